"""Torch's rendezvous for a job that may go on with fewer nodes than it has begun with.

Torch's own is complete at a number of nodes that is fixed, or once no other has come for a while.
Here it is node 0 that says how many nodes train (training.job.restart.presence), also while they
meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def follow(nodes: Callable[[], int]) -> None:
    """Let every rendezvous of this process be complete with as many nodes as train by then."""
    usual: Any = dynamic_rendezvous._RendezvousJoinOp

    class Join(usual):  # type: ignore[misc]
        def __call__(self, ctx: Any, deadline: float) -> Any:
            state = ctx.state
            waits = not state.complete and not state.closed and ctx.node in state.participants
            if waits and len(state.participants) >= nodes():
                return dynamic_rendezvous._Action.MARK_RENDEZVOUS_COMPLETE
            return super().__call__(ctx, deadline)

    setattr(dynamic_rendezvous, usual.__name__, Join)


def close(handler: Any, nodes: int) -> None:
    """Let no other node wait for a place once so many have met: it would have all start again."""
    object.__setattr__(handler.settings, "max_nodes", nodes)  # frozen, and shared by its parts
