"""How the nodes of a job meet again, and what they agree on there.

Torch's own rendezvous is complete at a fixed number of nodes, or once no other has come for a
while. Here node 0 says how many nodes train (training.job.restart.presence), even while they meet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, dynamic_rendezvous

NO_START = -1
"""Offered as the remaining restarts by a node that was asked to stop: no node starts ranks."""
STORE = 20.0
"""Seconds that the store on node 0 may take to answer."""


def follow(nodes: Callable[[], int]) -> None:
    """Make every rendezvous of this process complete once as many nodes have met as train then."""
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
    """Let no other node wait for a place once `nodes` have met: it would make all start again."""
    object.__setattr__(handler.settings, "max_nodes", nodes)  # frozen, and shared by its parts


def agree(store: Any, rank: int, world: int, remaining: int) -> int:
    """Agree among the nodes of a round on the least number of any. Raises RendezvousError."""
    try:
        store.set(f"remaining/{rank}", str(remaining))
        if rank == 0:
            counts = [int(store.get(f"remaining/{one}")) for one in range(world)]
            store.set("remaining", str(min(counts)))
        agreed = int(store.get("remaining"))
        store.set(f"read/{rank}", "")
        if rank == 0 and agreed == NO_START:  # the store ends with this process
            with suppress(RuntimeError):  # a node that is late fails by itself
                store.wait([f"read/{one}" for one in range(world)], timedelta(seconds=STORE))
        return agreed
    except RuntimeError as error:
        raise RendezvousConnectionError(f"the store has gone: {error}") from error
