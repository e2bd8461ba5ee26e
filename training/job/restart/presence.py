"""Signs of life of all nodes of a job that can go on without one, in node 0's store.

Each node's agent renews a counter there every second, by a connection and a thread of its own, and
reads its place. Node 0 watches the counters, not clocks, which differ. It reports a lost node to
its launcher by a file in the folder of this start (training.job.start_folder), and calls a spare or
lets fewer nodes train. A node that finds itself given up ends at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from training.errors import TrainingError
from training.job.node import Job
from training.job.restart.escalation import Step
from training.job.restart.roster import DONE, EMPTY, LEFT, SILENCE, Place, Roster

BEAT = 1.0
"""Seconds between two signs of life."""
MOST = 2.0
"""The most seconds that one look counts for: a node 0 that was suspended has heard nobody."""
STORE = 60.0
"""Seconds that the store on node 0 may take to answer."""
FAREWELL = 10.0
"""Seconds that node 0 waits at its end for the spares to see it."""
ALONE = 30.0
"""Seconds that a node waits for node 0 beyond the time after which node 0 gives the node up."""
SPARES, TRAINING = "spares", "training"


class NotNeeded(Exception):  # noqa: N818 - not an error
    """The job ends, and this spare was not needed."""


class Presence:
    """A node's sign of life and its place; on node 0 also the watch over all nodes."""

    def __init__(self, job: Job, worn: Collection[int] = ()) -> None:
        """Prepare. worn: nodes that have failed too often to be used, as node 0 knows them."""
        self._job = job
        self._roster = Roster(job.nodes, job.training, worn)
        self._place: Place | None = None
        self._has_waited = False
        self._beat = ""  # sent instead of the counter, unless empty
        self._spares, self._training = 0, job.training
        self._unanswered = 0.0  # seconds since the store last answered
        self._gone = ""  # why the store cannot be reached
        self._is_over = False
        self._changed = threading.Condition()
        self._lost: Callable[[int, bool], Step | None] = lambda node, trained: None
        self._given_up: Callable[[], Any] = lambda: None
        self._thread: threading.Thread | None = None
        self._server: Any = None  # node 0's store, kept until the spares know of the end

    @property
    def has_waited(self) -> bool:
        """Whether this node was a spare."""
        return self._has_waited

    @property
    def spares(self) -> int:
        """How many spares were waiting at the last look."""
        return self._spares

    @property
    def training(self) -> int:
        """How many nodes are to train, as node 0 last said."""
        return self._training

    def begin(
        self, store: Any, lost: Callable[[int, bool], Step | None], given_up: Callable[[], Any]
    ) -> None:
        """Begin to give signs of life.

        store: a connection to node 0's store, from which to open another. lost: called on node 0
        with a node that is lost, and whether it trained; returns what follows if it trained.
        given_up: called if node 0 has given this node up; does not return.
        """
        self._lost, self._given_up = lost, given_up
        self._server = store
        self._thread = threading.Thread(
            target=self._run, args=(store.host, store.port), name="presence", daemon=True
        )
        self._thread.start()
        if self._job.node_rank:
            threading.Thread(target=self._watch_answers, name="answers", daemon=True).start()

    def wait(self) -> None:
        """Wait until this node is to train. Raises NotNeeded, or TrainingError without node 0."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone or self._place in (Place.TRAINS, Place.ENDS))
            if self._place is Place.ENDS:
                raise NotNeeded
            if self._place is not Place.TRAINS:
                raise TrainingError(f"node 0 has ended: {self._gone}", local=True)

    def leave(self, step: Step) -> None:
        """Give up this node's place, to a spare or for good."""
        self._beat = EMPTY if step is Step.SHRINK else LEFT
        if self._thread is not None:
            self._thread.join(STORE)

    def end(self) -> None:
        """Announce the end of this node's program; on node 0, the end of the job to its spares."""
        self._is_over = True
        self._beat = self._beat or DONE
        if self._thread is not None:
            self._thread.join(FAREWELL + STORE if self._job.node_rank == 0 else FAREWELL)

    def _run(self, host: str, port: int) -> None:
        from torch.distributed import PrefixStore, TCPStore

        try:
            connection = TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE),
            )
            store: Any = PrefixStore(f"presence.{self._job.run_id}", connection)
            if self._job.node_rank == 0:
                self._watch(store)
            else:
                self._show(store)
        except RuntimeError as error:  # torch's errors of a store and its connection
            self._end_waiting(str(error).partition("\n")[0] or "its store is gone")

    def _end_waiting(self, why: str) -> None:
        with self._changed:
            self._gone = self._gone or why
            self._changed.notify_all()

    def _watch_answers(self) -> None:
        """End a node that is cut off from node 0, which has gone on without it by now.

        A connection need not end because of that, and none has a time limit. If node 0 has ended,
        this node's agent sees it earlier, and ends by itself.
        """
        before = time.monotonic()
        while not self._is_over and not self._beat and self._place is not Place.ENDS:
            time.sleep(BEAT)
            now = time.monotonic()
            # Until the first answer, node 0's own program may not have begun.
            self._unanswered += min(now - before, MOST) if self._place else 0.0
            before = now
            if self._unanswered > SILENCE + ALONE:
                self._end_waiting("it does not answer")
                if self._place is Place.TRAINS:
                    self._given_up()
                return

    def _show(self, store: Any) -> None:
        """Give signs of life, and follow node 0's decisions."""
        me, number = self._job.node_rank, 0
        while True:
            number += 1
            beat, self._unanswered = self._beat or str(number), 0.0
            store.set(f"beat/{me}", beat)
            if not beat.isdecimal():
                return
            place = Place(store.get(f"place/{me}").decode())
            self._spares = int(store.get(SPARES))
            self._training = int(store.get(TRAINING))
            if place is Place.LOST:
                self._given_up()
            self._has_waited |= place is Place.WAITS
            if place is not self._place:
                with self._changed:
                    self._place = place
                    self._changed.notify_all()
            if place is Place.ENDS:
                store.set(f"end/{me}", "")
                return
            time.sleep(BEAT)

    def _watch(self, store: Any) -> None:
        """Watch over all nodes until the end."""
        nodes = range(self._job.nodes)
        for node in nodes:
            store.compare_set(f"beat/{node}", "", NONE)
        sent: dict[int, Place] = {}
        before = time.monotonic()
        while not self._is_over:
            beats = [_text(one) for one in store.multi_get([f"beat/{node}" for node in nodes])]
            now = time.monotonic()
            lost = self._roster.heard(beats, min(now - before, MOST))
            before = now
            for node in self._roster.left(beats):
                self._roster.places[node] = Place.LEFT
                self._go_on(Step.SHRINK if beats[node] == EMPTY else Step.REPLACE)
            for node in lost:
                self._give_up(store, node)
            self._tell(store, sent)
            time.sleep(BEAT)
        waiting = [node for node in nodes if self._roster.places[node] in (Place.WAITS, Place.OUT)]
        for node in waiting:
            store.set(f"place/{node}", Place.ENDS.value)
        heard = [f"end/{node}" for node in waiting if _text(store.get(f"beat/{node}"))]
        if heard:
            store.wait(heard, timedelta(seconds=FAREWELL))

    def _give_up(self, store: Any, node: int) -> None:
        trained = self._roster.places[node] is Place.TRAINS
        self._roster.places[node] = Place.LOST
        store.set(f"place/{node}", Place.LOST.value)
        self._spares = len(self._roster.waiting())
        self._go_on(self._lost(node, trained))

    def _go_on(self, step: Step | None) -> None:
        if step is Step.REPLACE:
            self._roster.call()
        elif step is Step.SHRINK:
            self._roster.shrink()

    def _tell(self, store: Any, sent: dict[int, Place]) -> None:
        """Publish the nodes' new places, and how many are spares and how many train."""
        self._spares, self._training = len(self._roster.waiting()), self._roster.training
        store.set(SPARES, str(self._spares))
        store.set(TRAINING, str(self._training))
        for node, place in self._roster.places.items():
            if sent.get(node) is not place:
                sent[node] = place
                store.set(f"place/{node}", place.value)
        if self._place is not Place.TRAINS:
            with self._changed:
                self._place = Place.TRAINS
                self._changed.notify_all()


NONE = "none"


def _text(beat: bytes) -> str:
    """Decode a sign of life; empty if there was none yet."""
    text = beat.decode()
    return "" if text == NONE else text
