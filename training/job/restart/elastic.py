"""Torchrun's agent, extended to restart all ranks of a job in the running containers.

The agent of a node sees its ranks fail, meets the other agents at the rendezvous for another round,
and starts its ranks anew; agents whose ranks are healthy see one waiting there and follow. That is
torch's own work (torch.distributed.elastic). What is decided here is whether to: the first node to
see a failure publishes what follows in the store of the round, and all nodes that fail obey. A node
that does not restart closes the rendezvous, so no other waits for it.

If the job outlives its nodes, every agent waits to be called by node 0 before it meets the others,
so a spare is at no rendezvous until it takes a place (training.job.restart.presence).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from training.checkpoint.lease import ROUND
from training.errors import HUNG, SAVED, TrainingError
from training.job import children
from training.job.restart import meeting
from training.job.restart.control import Decision, RestartControl, tell
from training.job.restart.escalation import FINAL, NO_CAUSE, STUCK, WITHOUT_NODE, Step
from training.job.restart.meeting import NO_START, STORE
from training.job.restart.presence import Presence
from training.job.restart.roster import SILENCE
from training.process_group import LONGEST_COPY

GRACE = 5.0
"""Seconds that a node's ranks have to end by themselves after the first of them has failed."""
HANG_GRACE = 15.0
"""The same if the watch ended the first: the others are ended by their own, rank 0 last."""
DEATH = 20.0
"""Seconds that a process may take to die by kill -9; after that it hangs in a driver or disk."""
CAUSE = 20.0
"""Seconds that a node waits for word from the node whose failure took its own ranks along."""
REJOIN = 60
"""Seconds for all nodes to meet again: none has a container to start."""

NOTHING = "none"
KEY = "decision"


class Stopped(Exception):  # noqa: N818 - not an error
    """The job was asked to stop while no ranks ran: everything there is to save is saved."""


@dataclass(kw_only=True)
class Ranks:
    """What the agent can do with the ranks of its node, and knows of their ends."""

    asked: Callable[[], bool]  # whether the job was asked to stop
    hand_on: Callable[[], None]  # hand that request on to the ranks
    examine: Callable[[Mapping[int, Any], Ranks], Found]  # judge torch's failures of ranks
    leave: Callable[[list[int]], Any]  # end this process, as node 0 cannot be reached
    control: RestartControl | None = None
    presence: Presence | None = None  # only if the job outlives its nodes
    found: Found | None = None  # how the ranks of the last start failed
    killed: set[int] = field(default_factory=set)  # processes that this agent killed
    ended: dict[int, float] = field(default_factory=dict)  # when processes were seen to have ended


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a node's failed ranks show; the one that failed first comes first."""

    rank: int
    code: int  # exit code of the node
    codes: tuple[int, ...]
    why: str
    was_taken_along: bool  # none of them failed by itself
    is_cause: bool  # one did, and not by an error that all ranks of the job raise
    may_be_cause: bool  # one aborted, and may have failed by itself


class InPlaceAgent(LocalElasticAgent):
    """Restarts ranks in place, as training.job.restart.escalation decides."""

    def __init__(self, *words: Any, ranks: Ranks, **named: Any) -> None:
        super().__init__(*words, **named)
        assert ranks.control is not None
        self._ranks, self._control = ranks, ranks.control
        self._pids: list[int] = []
        self._is_stuck = False  # a process of the last start survives kill -9
        self._running = False  # between two rendezvous
        self._loss: Decision | None = None  # of a node in this round; on node 0 only
        self._losing = threading.Lock()  # guards the two above
        if presence := ranks.presence:
            meeting.follow(lambda: presence.training)
            handler: Any = self._worker_group.spec.rdzv_handler
            presence.begin(handler._store, self._lost, self._given_up)

    @property
    def _restarted(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    @property
    def _nodes(self) -> int:
        return self._worker_group.group_world_size or 1

    def _rendezvous(self, worker_group: Any) -> None:
        if self._ranks.presence and not self._control.has_started:
            self._await_call(self._ranks.presence, worker_group.spec.rdzv_handler)
        with self._rejoining(worker_group):
            super()._rendezvous(worker_group)
            world, remaining = worker_group.group_world_size, self._remaining_restarts
            if self._ranks.presence:
                meeting.close(worker_group.spec.rdzv_handler, world)
            if self._ranks.asked() and self._control.has_started:
                remaining = NO_START
            if world > 1 and self._control.decides:  # one that only follows has not counted
                remaining = meeting.agree(self._store, worker_group.group_rank, world, remaining)
            if remaining == NO_START:
                raise Stopped
            self._remaining_restarts = remaining
        with self._losing:
            self._running, self._loss = True, None

    def _await_call(self, presence: Presence, handler: Any) -> None:
        """Wait until node 0 lets this node train. Raises NotNeeded at the job's end."""
        leave, handler.shutdown = handler.shutdown, lambda: True  # it has no part in the rendezvous
        presence.wait()
        handler.shutdown = leave
        if presence.has_waited:
            tell(f"node {self._control.job.node_rank}, a spare, takes the place of another")

    @property
    def _codes(self) -> list[int]:
        return list(self._ranks.found.codes) if self._ranks.found else [TrainingError.exit_code]

    @contextmanager
    def _rejoining(self, worker_group: Any) -> Iterator[None]:
        """Wait less for nodes that only have to come back, and not forever for node 0."""
        if not self._control.has_started:
            yield
            return
        handler: Any = worker_group.spec.rdzv_handler
        handler.settings.timeout._join = timedelta(seconds=REJOIN)
        # Torch 2.13 keeps the store of the ranks, which has the addresses of dead ones.
        handler._shared_tcp_store_server = handler._bootstrap_store_info = None
        guard = threading.Timer(REJOIN + STORE, self._ranks.leave, (self._codes,))
        guard.daemon = True
        guard.start()
        try:
            yield
        finally:
            guard.cancel()

    def _start_workers(self, worker_group: Any) -> Any:
        ranks = self._ranks
        if ranks.presence:
            handler: Any = worker_group.spec.rdzv_handler
            os.environ[ROUND] = str(handler._state_holder.state.round)
        self._control.starting(self._restarted)
        found = super()._start_workers(worker_group)
        self._pids, ranks.found = list(found.values()), None
        ranks.killed.clear()
        ranks.ended.clear()
        if ranks.asked():  # since the nodes met, when there were no ranks to hand it on to
            ranks.hand_on()
        return found

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        if self._loss is not None:
            return self._without_lost_node(self._loss)
        spared = self._ranks.presence is not None
        if (self._remaining_restarts > 0 or spared) and not self._ranks.asked():
            self._end_those_left()
        result = super()._monitor_workers(worker_group)
        failed = result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED)
        if failed:
            self._add_ended(worker_group, result.failures)
        if failed and not (result.failures and self._restarts(result)):
            self._remaining_restarts = 0
        return result

    def _add_ended(self, worker_group: Any, failures: dict[int, ProcessFailure]) -> None:
        """Add the ranks that torchrun has ended after the first failure.

        The cause may be among them, on its way out; older torch, such as 2.2, omits them.
        """
        context: Any = self._pcontext
        for local, handler in context.subprocess_handlers.items():
            rank, process = worker_group.workers[local].global_rank, handler.proc
            if rank not in failures and process.poll():
                file = context.error_files[local]
                failures[rank] = ProcessFailure(local, process.pid, process.poll(), file)

    def _without_lost_node(self, loss: Decision) -> RunResult:
        """On node 0, go on without a lost node, whose ranks the ones here may still wait for."""
        self._loss = None
        self._control.adopt(loss)
        if loss.verdict.step not in WITHOUT_NODE:
            self._kill(self._pids)
            raise TrainingError(f"{loss.failure.why}: {loss.verdict.why}", local=True)
        self._remaining_restarts += 1  # torchrun counts it, but it is not one of RESTARTS
        return RunResult(state=WorkerState.UNHEALTHY)

    def _lost(self, node: int, trained: bool) -> Step | None:
        """On node 0, decide on a node without sign of life; return what follows if it trained."""
        control, presence = self._control, self._ranks.presence
        assert presence is not None
        failure = control.loss(node)
        if not trained:
            tell(f"{failure.why}; it was a spare, and {presence.spares} are left")
            return None
        with self._losing:
            restarted, asked = self._restarted, self._ranks.asked()
            own = control.decide(failure, restarted, asked=asked, presence=presence)
            control.note(own, restarted)
            if not self._running:  # the remaining nodes are meeting already
                control.adopt(own)
            elif self._ask(lambda: self._publish(own)) == own.text:
                self._loss = own
            else:  # an earlier failure, which all follow
                control.adopt(own)
        return own.verdict.step

    def _given_up(self) -> None:
        """End this node, which node 0 has given up by now."""
        children.kill_groups(self._pids)
        tell(f"node 0 and this node have not heard of each other for {SILENCE:.0f} s: it ends")
        os._exit(TrainingError.exit_code)

    def _leave_place(self, presence: Presence, step: Step) -> None:
        """Give up the place of this node, and keep it away from the rendezvous."""
        handler: Any = self._worker_group.spec.rdzv_handler
        handler._stop_heartbeats()
        with suppress(RuntimeError):
            leave = dynamic_rendezvous._RendezvousExitOp()
            handler._op_executor.run(leave, time.monotonic() + STORE)
        handler.shutdown = lambda: True  # it would end the rendezvous for all
        presence.leave(step)

    def _restart_workers(self, worker_group: Any) -> None:
        with self._losing:
            self._running = False
        if worker_group.state is WorkerState.HEALTHY:
            self._follow()
        self._kill(self._pids)
        if self._is_stuck:
            raise TrainingError("a process does not die by kill -9", local=True)
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        # A node that fails after this one has succeeded must not wait for it at a rendezvous.
        self._publish_stop()
        if int(self._worker_group.group_rank or 0):  # rank 0 writes the model; srun would end it
            self._exit_barrier_timeout = LONGEST_COPY.total_seconds()
        super()._exit_barrier()

    def _end_those_left(self) -> None:
        """Once a rank has failed, end the node's others, which wait for it, without a long grace.

        Torchrun would send a SIGTERM, which ranks take as a request to save, and wait for 30 s.
        """
        codes = {pid: children.exit_code(pid) for pid in self._pids}
        failed = [code for code in codes.values() if code]
        if not failed or SAVED in failed or set(failed) & set(FINAL):
            return
        deadline = time.monotonic() + (HANG_GRACE if HUNG in failed else GRACE)
        left = self._pids
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if not self._has_ended(pid)]
            time.sleep(0.05)
        self._ranks.killed.update(left)
        self._kill(left)

    def _has_ended(self, pid: int) -> bool:
        if not children.has_ended(pid):
            return False
        self._ranks.ended.setdefault(pid, time.time())
        return True

    def _kill(self, pids: Sequence[int]) -> None:
        """Kill processes with all below them; note whether any lives on."""
        children.kill_groups(pids)
        self._is_stuck = bool(children.wait_ended(pids, DEATH))

    def _restarts(self, result: RunResult) -> bool:
        """Decide what follows a failure; return whether this node starts its ranks again."""
        ranks, control, restarted = self._ranks, self._control, self._restarted
        found = ranks.found = ranks.examine(result.failures, ranks)
        presence = ranks.presence
        failure = control.failure(found.rank, found.code, found.why, is_cause=found.is_cause)
        obstacle = STUCK if self._is_stuck else ""
        own = control.decide(
            failure, restarted, asked=ranks.asked(), obstacle=obstacle, presence=presence
        )
        if self._nodes == 1 or not control.decides:
            if self._nodes == 1 or (not found.was_taken_along and self._sees_first(own)):
                control.note(own, restarted)
            control.adopt(own)
            return own.verdict.step is Step.RESTART
        text: str | None = ""
        if found.was_taken_along and own.verdict.step is not Step.STOP:
            wait = CAUSE + (SILENCE if presence else 0.0)
            text = self._ask(lambda: self._published(wait))
            if text == "" and not found.may_be_cause:
                own = control.decide(failure, restarted, asked=ranks.asked(), obstacle=NO_CAUSE)
        text = self._ask(lambda: self._publish(own)) if text == "" else text
        if text is None:
            tell("node 0 has ended: no restart in place")
            control.adopt(own)
            return False
        agreed = Decision.of(text)
        if text == own.text:
            control.note(own, restarted)
        control.adopt(agreed)
        # A node that was asked to stop says so where the nodes meet, and all of them stop there.
        vetoed = self._is_stuck or own.verdict.step is Step.FIX
        if agreed.verdict.step not in WITHOUT_NODE or vetoed:
            return agreed.verdict.step is Step.RESTART and not vetoed
        assert presence is not None
        if agreed.failure.node == control.job.node_rank:
            self._leave_place(presence, agreed.verdict.step)
            return False
        self._remaining_restarts += 1  # as in _without_lost_node
        return True

    def _sees_first(self, own: Decision) -> bool:
        """Tell whether no other node has noted the failure that ends all of them.

        If node 0 can no longer tell, it may be noted twice, which the ledger allows for.
        """
        if own.verdict.step is Step.STOP:  # it is no failure, and one may still come
            return False
        return self._ask(lambda: self._publish(own), leaves=False) in (None, own.text)

    def _publish(self, own: Decision) -> str:
        """Publish a decision, unless another node has published one; return the one that counts."""
        store: Any = self._store
        return bytes(store.compare_set(KEY, "", own.text)).decode()

    def _published(self, wait: float = 0.0) -> str:
        """Return what a node publishes in this round within `wait` seconds; empty if none does."""
        store: Any = self._store
        deadline = time.monotonic() + wait
        while True:
            text = bytes(store.compare_set(KEY, NOTHING, NOTHING)).decode()
            if text != NOTHING:
                return text
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.2)

    def _publish_stop(self) -> None:
        """Let no node restart in this round: this one has finished."""
        control = self._control
        if self._nodes > 1 and control.decides:
            own = control.decide(control.failure(0, SAVED, ""), 0, asked=True)
            self._ask(lambda: self._publish(own))

    def _follow(self) -> None:
        """Adopt what another node has decided, and say so."""
        text = self._ask(self._published)
        if text:
            agreed = Decision.of(text)
            self._control.adopt(agreed)
            tell(f"restarts its ranks too: {agreed.failure.why} on {agreed.failure.host}")

    def _ask(self, question: Callable[[], str], *, leaves: bool = True) -> str | None:
        """Ask the store on node 0; None if it is gone. If it never answers, leave if `leaves`."""
        given: list[str | None] = []

        def ask() -> None:
            try:
                given.append(question())
            except RuntimeError:  # torch's errors of a store and its connection
                given.append(None)

        thread = threading.Thread(target=ask, name="decision", daemon=True)
        thread.start()
        thread.join(CAUSE + SILENCE + STORE)
        if not given and leaves:
            self._ranks.leave(self._codes)
        return given[0] if given else None
