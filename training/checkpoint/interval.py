"""How often a run saves with checkpoint_minutes=auto: by the cost of a save and node failures.

docs/background/scale/checkpoints.md has the derivation, and the cost of other intervals. All times
are in seconds. Light: no torch.
"""

from __future__ import annotations

from math import sqrt

NODE_MTBF = 54 * 24 * 3600 * 2048 / 419
"""Mean time between failures of one node, 6,300 hours: 419 unexpected interruptions in 54 days on
2,048 nodes (Llama 3, arXiv 2407.21783, section 3.3.4)."""
FIRST = 600.0
"""The interval until a save has been measured."""
SHORTEST, LONGEST = 60.0, 3600.0
"""Bounds of the interval. Below a minute, a failure loses less to it than to starting again. Above
an hour, a run loses more to what is no node failure (a bug, a person) than saves cost."""


def daly(stall: float, mtbf: float) -> float:
    """Compute the training time between two saves that loses the least, in seconds.

    J. T. Daly, Future Generation Computer Systems 22 (3), 303 (2006), equation 37, for a stall
    below 2 mtbf; from there on mtbf. Its first order, sqrt(2 stall mtbf), is J. W. Young's,
    Communications of the ACM 17 (9), 530 (1974).

    stall: how long training stands still for a save. mtbf: the job's mean time between failures.
    """
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return sqrt(2 * stall * mtbf) * (1 + sqrt(part) / 3 + part / 9) - stall


def best_interval(stall: float, writing: float, nodes: int) -> float:
    """Compute the interval of a job: Daly's, for NODE_MTBF over its nodes, within the bounds.

    It is at least `writing`, the time from the stall until a checkpoint is complete, for which the
    next save would wait.
    """
    return min(max(daly(stall, NODE_MTBF / nodes), SHORTEST, writing), max(LONGEST, writing))


def described(interval: float, stall: float, nodes: int) -> str:
    """Describe in one line what was chosen, and why."""
    hours = NODE_MTBF / nodes / 3600
    fails = f"{hours / 24:,.0f} days" if hours >= 48 else f"{hours:,.1f} hours"
    return (
        f"checkpoint_minutes=auto: a checkpoint every {interval / 60:.1f} minutes from now on, as "
        f"one stops training for {stall:.2f} s and {nodes} node{'s' if nodes > 1 else ''} may be "
        f"expected to fail once in {fails}"
    )
