"""The checks of all nodes before a job trains; docs/training/preflight.md has their limits.

Words: a **finding** is what one check saw on one node; a **fault** is what is wrong, with the node
that it is wrong on if that is known. The **coordinator**, a thread of node 0, hears every node
over its **hub**, has them compute together, and judges. The **workers** of a node are its
processes that use the devices, one for each process of the training to come.
"""

from training.job.preflight.participant import run

__all__ = ["run"]
