"""What follows a failure: restart in place, a spare node, fewer nodes, requeue, then give up.

docs/training/failures.md has the same as a table. Pure functions: what is known of a failure goes
in, and one of these steps comes out, with the reason in words.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from training.errors import BAD_NODE, HUNG, SAVED, RequestError

MISSING = 3
"""Exit code if something is not installed."""
FINAL = (RequestError.exit_code, MISSING)
LOST_FILES = 128 + signal.SIGBUS
"""Exit code if the files of a container are gone, as when its squashfuse was killed."""


STUCK = "a process of the node does not die by kill -9"
NO_CAUSE = "no node has said what took its ranks along: one may be lost"
NODE_FAILURES = 2
"""How often a node may be lost or have the first ranks to fail before it is no longer used."""


class Step(str, Enum):
    """What follows a failure, in the order in which it is tried."""

    RESTART = "restart in place"
    REPLACE = "spare node"
    SHRINK = "fewer nodes"
    REQUEUE = "requeue"
    GIVE_UP = "give up"
    FIX = "end: a person has to fix it"
    STOP = "stop"  # no failure: the job was asked to stop, and has saved


WITHOUT_NODE = (Step.REPLACE, Step.SHRINK)
"""The steps by which a job goes on without the node that failed, in the other containers."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a node's ranks failed, by the first of them, which took the others along."""

    rank: int | None  # None: the node was lost with all of them
    code: int  # exit code of the node
    step: int | None  # the last one taken; None: none in this start
    since: float | None = None  # when that was, in seconds since the epoch
    why: str = ""  # in words
    host: str = ""
    node: int = 0  # its rank among the nodes of this start
    is_cause: bool = True  # False: its ranks were taken along by an unnoted one, or all raise it

    @property
    def is_lost(self) -> bool:
        """Whether the node itself is gone."""
        return self.rank is None

    def is_like(self, other: Failure) -> bool:
        """Tell whether another failure came at the same step and in the same way."""
        return not self.is_lost and (self.step, self.code) == (other.step, other.code)

    def record(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How often each step may be taken, and has been taken."""

    restarts: int  # in place, in one start of the job: RESTARTS
    restarted: int = 0
    spares: int = 0  # nodes that wait
    nodes: int = 1  # nodes that train
    no_fewer: str | None = None  # why one node fewer cannot train; empty: it can; None: not asked
    # Over the whole job: REQUEUES, and those after time limits; None: nobody requeues it.
    requeues: int | None = None
    requeued: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows a failure, and why nothing cheaper does."""

    step: Step
    why: str


def decide(
    failure: Failure, before: Sequence[Failure], budget: Budget, obstacle: str = ""
) -> Verdict:
    """Choose what follows a failure.

    before: the failures of this job so far. obstacle: why the node knows that these containers are
    of no use, such as STUCK or NO_CAUSE; empty: it knows of nothing.
    """
    if failure.code == SAVED:
        return Verdict(step=Step.STOP, why="it was asked to stop, and has saved")
    if failure.code in FINAL:
        return Verdict(step=Step.FIX, why="the next try would end the same")
    why = _why_not_in_place(failure, before, budget) or obstacle
    repeats = any(failure.is_like(one) for one in before)
    if failure.node and not repeats and (bad := _why_without(failure, before)):
        if budget.spares:
            return Verdict(step=Step.REPLACE, why=f"{bad}, and a spare takes its place")
        if budget.no_fewer == "":
            left = f"{budget.nodes - 1} of {budget.nodes} nodes"
            return Verdict(step=Step.SHRINK, why=f"{bad}, no spare is left, and {left} go on")
        if failure.is_lost:
            why = f"{bad}, and no spare is left"
            if budget.no_fewer:
                why = f"{why}; with {budget.nodes - 1} nodes it cannot go on: {budget.no_fewer}"
    if not why:
        made = f"restart {budget.restarted + 1} of {budget.restarts}"
        return Verdict(step=Step.RESTART, why=f"{made} in these containers")
    if budget.requeues is None:
        return Verdict(step=Step.GIVE_UP, why=f"{why}; outside of Slurm nobody requeues it")
    if budget.requeued < budget.requeues:
        return Verdict(step=Step.REQUEUE, why=why)
    return Verdict(step=Step.GIVE_UP, why=f"{why}; of REQUEUES none is left")


def worn(failures: Sequence[Failure]) -> list[str]:
    """Name the nodes that have failed too often to be used, in the order in which they did.

    A failure that came again after the same step in the same way counts against no node: any would
    fail alike.
    """
    own = [one for one in failures if one.is_cause and one.code != HUNG]
    hosts = [one.host for one in own if sum(one.is_like(other) for other in failures) < 2]
    return [one for one in dict.fromkeys(hosts) if one and hosts.count(one) >= NODE_FAILURES]


def _why_without(failure: Failure, before: Sequence[Failure]) -> str:
    """Say why the job goes on without the node that failed; empty if the node stays.

    A hang does not show its node: the first watch to see it is not that of the rank that hangs.
    """
    if failure.is_lost:
        return "a node is lost"
    if failure.is_cause and failure.code != HUNG and failure.host in worn([*before, failure]):
        return f"{failure.host} has failed {NODE_FAILURES} times"
    return ""


def _why_not_in_place(failure: Failure, before: Sequence[Failure], budget: Budget) -> str:
    """Say why the same containers are of no use; empty if they may be."""
    if failure.code == BAD_NODE:
        return "a node is bad"
    if failure.code == LOST_FILES:
        return "the files of a container are gone"
    if any(failure.is_like(one) for one in before):
        after = "before its first step" if failure.step is None else f"after step {failure.step}"
        return f"it failed {after} in the same way before"
    if budget.restarted >= budget.restarts:
        return f"of RESTARTS={budget.restarts} none is left"
    return ""
