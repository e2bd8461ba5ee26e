"""The watchdog: a thread of every rank that notices when the rank's marks stop changing.

Ranks wait for each other in every step, so when one hangs, the marks of all stop soon. The first to
notice raises an alarm; all answer with their mark and stacks, and one of them reports the result.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from training.checkpoint.lease import RunLease
from training.config.config import RunConfig
from training.errors import HUNG
from training.loggers.console import Console
from training.observers.exchange import Exchange
from training.observers.hang_report import HangReporter
from training.observers.heartbeat import WATCHING, Heartbeat
from training.observers.phases import TRACE, Observer
from training.process_group import Group

SLOW = {"evaluation", "save", TRACE}
"""Parts that may take long without a mark; so may the first step, which compiles."""
SLOW_FACTOR = 10
"""How many times as long the slow parts may take."""
STEPS = 3
"""How many times the longest recent step is always waited for."""
SILENCE = 25.0
"""Seconds without an answer after which the store counts as gone."""
LAST = 5.0
"""Seconds that the store, the console and the disk each have when the process is to end."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Seconds without a mark after which a rank raises an alarm, or ends; 0: never."""

    alarm: float
    end: float

    def now(self, longest_step: float | None, phase: str) -> Limits:
        """Return the limits that apply to a run with such steps, in such a part."""
        slow = longest_step is None or phase in SLOW
        least = STEPS * (longest_step or 0.0)
        factor = SLOW_FACTOR if slow else 1
        return Limits(
            alarm=self.alarm and max(self.alarm, least) * factor,
            end=self.end and max(self.end, 2 * least) * factor,
        )


class HangWatchdog(Observer):
    """Watches this rank while it is entered; making it is a collective call."""

    def __init__(
        self, run: RunConfig, group: Group, heartbeat: Heartbeat, console: Console, lease: RunLease
    ) -> None:
        self._group, self._heartbeat, self._lease = group, heartbeat, lease
        self._limits = Limits(run.hang_seconds, run.hang_abort_seconds)
        self._reporter = HangReporter(Path(run.save_ckpt_path), console)
        shortest = min(filter(None, (run.hang_seconds, run.hang_abort_seconds)))
        self._interval = min(5.0, shortest / 6)
        self._exchange = Exchange(group, heartbeat, self._interval, self._reporter)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=WATCHING, daemon=True)
        self._alarmed = -1  # the step in which this rank raised an alarm: one a step is enough
        self._seen = heartbeat.last
        self._idle = 0.0

    def __enter__(self) -> HangWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exchange.close()
        self._over.set()
        self._thread.join()
        if error[0] is None and self._heartbeat.last != self._seen:
            self._reporter.progress()

    def begin(self, phase: str) -> None:
        self._heartbeat.begin(phase)

    def end(self, phase: str) -> None:
        self._heartbeat.end(phase)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self._interval):
            now = time.monotonic()
            # Time during which this process was suspended, as by a scheduler, does not count.
            self._look(min(now - before, 2 * self._interval))
            before = now

    def _look(self, passed: float) -> None:
        """Look at the mark; what is done if it has not changed does not wait for other ranks."""
        mark = self._heartbeat.last
        if mark != self._seen:
            self._seen, self._idle = mark, 0.0
            self._reporter.progress()
            return
        self._idle += passed
        limits = self._limits.now(self._heartbeat.longest_step, self._heartbeat.phase)
        if limits.end and self._idle > limits.end:
            self._end()
        if limits.alarm and self._idle > limits.alarm:
            if self._alarmed != mark.step:
                self._alarmed = mark.step
                self._exchange.raise_alarm()
            elif self._alone and self._speaks and not self._reporter.open:
                self._exchange.tell_alone()

    @property
    def _alone(self) -> bool:
        """Whether the other ranks cannot be asked."""
        return time.monotonic() - self._exchange.heard > SILENCE

    @property
    def _speaks(self) -> bool:
        """Whether this rank reports if none can be asked: the first of each node does, and rank 1.

        Rank 1, because rank 0 may be the one that hangs.
        """
        rank = self._group.rank
        return rank == 1 or rank % self._group.local_world_size == 0

    def _end(self) -> None:
        """End this process; one of the ranks says why. Waits only briefly for what may hang."""
        if self._alone:
            speaks = self._speaks
        else:
            speaks = call_with_timeout(LAST, lambda: self._exchange.is_first("end"), self._speaks)
        if speaks:
            call_with_timeout(LAST, self._say_why, None)
        if self._group.rank == 0:  # it may host the store that the others still have to ask
            time.sleep(2 * self._interval)
        call_with_timeout(LAST, self._lease.release, None)
        os._exit(HUNG)

    def _say_why(self) -> None:
        known, mark = self._exchange.verdict, self._seen
        what = known or f"rank {self._group.rank} waits in step {mark.step}, {mark.place}"
        stacks = f"; {self._reporter.file} has the stacks" if known else ""
        self._reporter.error(
            f"{what}; no progress for {self._idle:.0f} s, the run ends (hang_abort_seconds){stacks}"
        )


def call_with_timeout(seconds: float, work: Callable[[], T], otherwise: T) -> T:
    """Return what `work` returns, or `otherwise` if it takes longer or fails; it may go on working.

    For a process that is about to end, and must not be held up by a store or disk that hangs.
    """
    given: list[T] = []
    thread = threading.Thread(
        target=lambda: given.append(work()), name=f"{WATCHING}-end", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return given[0] if given else otherwise
