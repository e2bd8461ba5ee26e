"""The part of a node's agent that decides, without torch: what it knows, logs and notes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.checkpoint.memory_folder import STARTS, MemoryFolder
from training.errors import BAD_NODE
from training.job import start_folder
from training.job.node import Job
from training.job.preflight.checks_network import BadNodes
from training.job.preflight.settings import NodeNames
from training.job.restart import escalation
from training.job.restart.escalation import Budget, Failure, Step, Verdict
from training.job.restart.ledger import Ledger, Outage, here
from training.job.restart.presence import Presence
from training.job.restart.roster import SILENCE
from training.job.restart.steps import StepReader

LOOK = 0.2
"""Seconds between two looks for the end of a start's first step."""


@dataclass(frozen=True)
class Decision:
    """What the nodes of a job have agreed on: a failure, and what follows it."""

    failure: Failure
    verdict: Verdict

    @classmethod
    def of(cls, text: str) -> Decision:
        """Parse what the property `text` gives."""
        record = json.loads(text)
        verdict = Verdict(step=Step(record["then"]), why=record["why"])
        return cls(Failure(**record["failure"]), verdict)

    @property
    def text(self) -> str:
        record = {"then": self.verdict.step.value, "why": self.verdict.why}
        return json.dumps({"failure": self.failure.record(), **record})


class RestartControl:
    """What one node knows of its job's failures, from one start of its ranks to the next."""

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        budget: Budget,
        environment: MutableMapping[str, str] = os.environ,
        memory: MemoryFolder | None = None,
        why_not_on: Callable[[int], str] = lambda nodes: "",
    ) -> None:
        """Read what is known from earlier starts of the job.

        environment: the ranks', which gets the name of the file for their steps. memory: where they
        keep copies of checkpoints from one start to the next. why_not_on: says why the run cannot
        go on with a smaller number of nodes; empty if it can.
        """
        self._memory, self._why_not_on = memory, why_not_on
        self._job, self._ledger, self._budget = job, ledger, budget
        self._environment = environment
        self._names = NodeNames(job, environment)
        self._before = ledger.failures()
        self._steps = StepReader(environment)
        self._outage = ledger.outage()
        self._starts = 0
        self._final: int | None = None

    @property
    def restarts(self) -> int:
        """How many restarts in place are allowed."""
        return self._budget.restarts

    @property
    def job(self) -> Job:
        """The job, as this node sees it."""
        return self._job

    @property
    def decides(self) -> bool:
        """Whether anything cheaper than a requeue may be decided."""
        return self._budget.restarts > 0 or self._job.outlives_nodes

    @property
    def worn(self) -> list[int]:
        """The node ranks in this start of the nodes that have failed too often."""
        hosts = escalation.worn(self._before)
        return [node for node in range(self._job.nodes) if self._names.host(node) in hosts]

    @property
    def has_started(self) -> bool:
        """Whether ranks have been started on this node."""
        return self._starts > 0

    def starting(self, restarted: int) -> None:
        """Begin to follow ranks that are about to start, after `restarted` restarts in place."""
        self._steps.clear()
        self._starts += 1
        self._environment[STARTS] = str(self._starts)
        if self._memory is not None:
            self._memory.make()
        if self._job.node_rank == 0:
            watch = threading.Thread(
                target=self._watch, args=(self._starts, restarted), name="steps", daemon=True
            )
            watch.start()

    def outcome(self, own: int) -> int:
        """The node's exit code, whose ranks ended with `own`: of a final failure, that of all."""
        return own if self._final is None else self._final

    def close(self) -> None:
        """Remove what is kept for a restart in place: there will be none. May be called again."""
        if self._memory is not None:
            self._memory.remove()

    def failure(self, rank: int, code: int, why: str, *, is_cause: bool = True) -> Failure:
        """Describe how this node's ranks have failed."""
        node = self._job.node_rank
        return replace(self._at_step(node), rank=rank, code=code, why=why, is_cause=is_cause)

    def loss(self, node: int) -> Failure:
        """Describe the loss of another node, and tell the launcher, so that it keeps the job."""
        found = self._at_step(node)
        folder = start_folder.find(self._job, self._environment)
        if folder is not None and self._names.host(node):
            start_folder.lose(folder, found.host)
        silent = f"it has given no sign of life for {SILENCE:.0f} s"
        return replace(found, why=f"{found.host} is lost: {silent}")

    def _at_step(self, node: int) -> Failure:
        """Describe the loss of a node, at the step that this node is at."""
        steps = self._steps.read()
        took = steps is not None and steps.first_at > 0
        own = here() if node == self._job.node_rank else f"node {node}"
        return Failure(
            rank=None,
            code=BAD_NODE,
            step=steps.last if steps and took else None,
            since=round(steps.last_at, 3) if steps and took else None,
            host=self._names.host(node) or own,
            node=node,
        )

    def decide(
        self,
        failure: Failure,
        restarted: int,
        *,
        asked: bool,
        obstacle: str = "",
        presence: Presence | None = None,
    ) -> Decision:
        """Decide for this node alone. asked: this node was asked to stop."""
        if asked and failure.code not in escalation.FINAL:
            verdict = Verdict(step=Step.STOP, why="the job was asked to stop")
        else:
            budget = replace(self._budget, restarted=restarted)
            if presence:
                nodes = presence.training
                fewer = self._why_not_on(nodes - 1) if self._job.shrink else None
                budget = replace(budget, spares=presence.spares, nodes=nodes, no_fewer=fewer)
            verdict = escalation.decide(failure, self._before, budget, obstacle)
        return Decision(failure, verdict)

    def note(self, decision: Decision, restarted: int) -> None:
        """Note what this node has decided for all, and log it if there was a choice.

        The end of a healthy run is no failure, and is not noted.
        """
        failure, verdict = decision.failure, decision.verdict
        if verdict.step is Step.STOP:
            return
        steps = self._steps.read()
        self._ledger.failed(failure, verdict, restarted, steps.seconds if steps else None)
        after = "before the first step" if failure.step is None else f"after step {failure.step}"
        alone = not self.decides and self._budget.requeues is None
        if verdict.step is Step.FIX or alone:
            return
        tell(f"{verdict.step.value}: {failure.why} {after}: {verdict.why}")

    def adopt(self, decision: Decision) -> None:
        """Accept what the nodes have agreed on as what has happened here."""
        if decision.verdict.step is Step.STOP:  # no failure, of whichever node it came first
            return
        if decision.verdict.step is Step.FIX:
            self._final = decision.failure.code
        known = escalation.worn(self._before)
        self._before.append(decision.failure)
        named = escalation.worn(self._before)
        if self._job.outlives_nodes and self._job.node_rank == 0 and named != known:
            self._name_worn(named)
        steps = self._steps.read()
        if steps and steps.first_at:
            self._outage = Outage(since=steps.last_at, step=steps.last, step_seconds=steps.seconds)

    def _name_worn(self, hosts: list[str]) -> None:
        """Log nodes that failed too often, and name them to the launcher for the next start."""
        times = escalation.NODE_FAILURES
        tell(f"{', '.join(hosts)}: failed {times} times in this job, and is of no more use to it")
        folder = self._environment.get("CHECKPOINTS")
        if folder and self._names.host(0):
            with suppress(OSError):
                BadNodes(Path(folder), self._job).write(hosts)

    def goodput(self) -> str:
        """Say what share of the job's time was training; empty before the first step."""
        steps = self._steps.read()
        if not steps or not steps.first_at:
            return ""
        return f"{self._ledger.goodput(time.time()):.1%} of the job's time was training"

    def _watch(self, start: int, restarted: int) -> None:
        """Wait for the first step of a start; note it, and log what has been lost."""
        while start == self._starts:
            steps = self._steps.read()
            if steps and steps.first_at:
                if said := self._ledger.trains(steps, self._outage, restarted):
                    tell(said, sys.stdout)
                return
            time.sleep(LOOK)


def tell(text: str, where: Any = None) -> None:
    """Print a line in the job's log."""
    print(f"training.launch: {text}", file=where or sys.stderr, flush=True)
