"""The checks of all nodes before a job trains; docs/training/preflight.md has their limits.

Terms: a **finding** is what one check saw on one node; a **fault** is what is wrong, and on which
node if that is known. The **coordinator**, a thread of node 0, talks with every node over its
**hub**, has the nodes compute together, and judges. The **workers** of a node are its processes
that use the devices, one for each process of the training to come.
"""

from training.job.preflight.participant import run

__all__ = ["run"]
