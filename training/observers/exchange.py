"""What the ranks tell each other about a hang, in a thread that may wait for the store.

A process that does not answer is examined by another one on the same machine: on a signal, Python's
faulthandler writes the stacks of a process, even while one of its threads holds the interpreter's
lock. It writes into an anonymous file (memfd), which others find under /proc; so nothing is left on
a disk, and no process gets a signal that it does not expect.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from training.errors import TrainingError
from training.observers.hang_report import Answer, HangReporter, Silence, find_verdict, format_hang
from training.observers.heartbeat import WATCHING, Heartbeat, Mark, own_stacks
from training.process_group import Group

STACKS_SIGNAL = signal.SIGUSR2
STACKS_WAIT = 2.0
"""Seconds that a process has to write its stacks."""

STORE_TIMEOUT = timedelta(seconds=10)
"""How long the store may take; the process that hosts it may be the one that hangs."""

CLOSING = 1.0
"""Seconds that a call of the store has to end when the run is over."""


@dataclass(frozen=True)
class Process:
    """Where a rank runs, and where it will write its stacks; sent to all ranks at the start."""

    host: str
    pid: int
    file: int | None  # its descriptor; None if the system has no memfd
    name: str  # of the file, so that another process of the same number is not taken for it

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    def described(self) -> str:
        """Say why the process does not answer, as far as can be seen from here."""
        what = f"its process {self.pid} on {self.host}"
        if not self.here:
            return f"{what} does not answer"
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return f"{what} {_PROCESS_STATES.get(state, 'does not answer')}"
        return f"{what} does not answer, or is gone"

    def stacks(self) -> str:
        """Have the process write its stacks; empty if it cannot, or is on another machine."""
        if not self.here or self.file is None:
            return ""
        path = Path(f"/proc/{self.pid}/fd/{self.file}")
        with suppress(OSError):
            if self.name not in str(path.readlink()):
                return ""
            before = path.stat().st_size
            os.kill(self.pid, STACKS_SIGNAL)
            end = time.monotonic() + STACKS_WAIT
            while time.monotonic() < end and path.stat().st_size == before:
                time.sleep(0.05)
            time.sleep(0.05)  # the stacks are written in several pieces
            return path.read_bytes()[before:].decode(errors="replace").strip()
        return ""


def register_process() -> Process:
    """Make this process write its stacks on STACKS_SIGNAL."""
    name, file = f"stacks-{uuid4().hex}", None
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(name)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    return Process(socket.gethostname(), os.getpid(), file, name)


_PROCESS_STATES = {
    "T": "is stopped by a signal (SIGCONT lets it go on)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk, a file system or a driver",
    "Z": "has ended",
    "R": "does not answer, and is computing",
}


class Board:
    """A separate connection to the store at which the ranks met, with a prefix of its own.

    Every method raises RuntimeError if the store does not answer.
    """

    def __init__(self, group: Group) -> None:
        """Connect (a collective call). Raises TrainingError on every rank if one cannot."""
        name = group.broadcast(uuid4().hex)  # torchrun keeps the store when it restarts ranks
        self._store: Any = dist.PrefixStore(f"watch/{name}", group.together(_connect))

    def alarms(self) -> int:
        """Count the alarms raised so far."""
        return int(self._store.add("alarms", 0))

    def raise_alarm(self, after: int) -> None:
        """Raise one more alarm, unless another rank has raised one after `after` alarms."""
        if self.first(f"raise/{after}"):
            self._store.add("alarms", 1)

    def first(self, task: str) -> bool:
        """Return True to exactly one of the ranks that ask: the one to do the task."""
        return int(self._store.add(task, 1)) == 1

    def answer(self, alarm: int, rank: int, answer: Answer) -> None:
        self._put(f"answer/{alarm}/{rank}", answer.packed())

    def answers(self, alarm: int, world_size: int) -> dict[int, Answer]:
        """Collect the ranks' answers so far."""
        found = {rank: self._get(f"answer/{alarm}/{rank}") for rank in range(world_size)}
        return {rank: Answer.of(packed) for rank, packed in found.items() if packed}

    def note(self, verdict: str) -> None:
        self._put("verdict", verdict)

    def noted(self) -> str:
        """Return the last verdict; empty if there was none."""
        return self._get("verdict")

    def _put(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._store.add(f"{key}/there", 1)

    def _get(self, key: str) -> str:
        """Return a text; empty if it is missing. A get alone would wait for it."""
        # Not with `check`, which only later versions of torch have in Python.
        there = int(self._store.add(f"{key}/there", 0))
        return self._store.get(key).decode() if there else ""


def _connect() -> Any:
    """Connect to the store of init_process_group by a new client: calls of one client queue up."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            host, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
    except RuntimeError as error:
        raise TrainingError(
            f"hang_seconds: the ranks cannot reach {host}:{port}, where they met; fix: let them "
            "reach it, or set hang_seconds=0 and hang_abort_seconds=0, so that nothing is watched"
        ) from error


class Exchange:
    """Raises alarms and answers those of other ranks; making it is a collective call.

    `heard` is when the store last answered. The process that hosts the store may be the one that
    hangs, and then a call of it may never return; so nothing here is waited for.
    """

    def __init__(
        self, group: Group, heartbeat: Heartbeat, interval: float, reporter: HangReporter
    ) -> None:
        self._group, self._heartbeat, self._interval, self._reporter = (
            group,
            heartbeat,
            interval,
            reporter,
        )
        self._board = Board(group)
        self._processes: list[Process] = [register_process()] * group.world_size
        dist.all_gather_object(self._processes, self._processes[group.rank], group=group.control)
        self._over = threading.Event()
        self._answered = 0  # alarms
        self._reported: Mark | None = None  # where this rank was when it last answered
        self._wanted = False
        self.heard = time.monotonic()
        self.verdict = ""  # of the last report that any rank made
        self._thread = threading.Thread(target=self._run, name=f"{WATCHING}-exchange", daemon=True)
        self._thread.start()

    def raise_alarm(self) -> None:
        """Ask all ranks where they are; one of them will report."""
        self._wanted = True

    def close(self) -> None:
        """End the exchange before the store goes away."""
        self._over.set()
        self._thread.join(CLOSING)

    def tell_alone(self) -> None:
        """Report what this rank knows without the store, which rank 0 or its torchrun hosts."""
        silent = {}
        if self._group.rank:
            text = f"{self._processes[0].described()}; nor does the store that is kept there"
            silent[0] = Silence(text, self._processes[0].stacks())
        self._reporter.hang(format_hang({self._group.rank: self._answer()}, silent))

    def is_first(self, task: str) -> bool:
        """Return True to one of the ranks that ask, to do a task; to all without a store."""
        try:
            return self._board.first(task)
        except RuntimeError:
            return True

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._talk()
                self.heard = time.monotonic()
            except RuntimeError:  # the store does not answer, which `heard` shows
                continue

    def _talk(self) -> None:
        if self._wanted:
            # A rank with longer steps waits longer: what it then sees has already been reported.
            if self._heartbeat.last != self._reported:
                self._board.raise_alarm(self._answered)
            self._wanted = False
        alarm = self._board.alarms()
        if alarm > self._answered:
            self._answered, self._reported = alarm, self._heartbeat.last
            self._board.answer(alarm, self._group.rank, self._answer())
            if self._board.first(f"report/{alarm}"):
                self._report(alarm)
        if self._answered:
            self.verdict = self._board.noted()

    def _answer(self) -> Answer:
        mark = self._heartbeat.last
        idle = time.monotonic() - mark.since
        return Answer(mark.step, mark.number, mark.place, idle, own_stacks())

    def _report(self, alarm: int) -> None:
        """Wait for the answers of the others, and report what is known."""
        time.sleep(2 * self._interval + 1)  # each rank looks once in an interval
        answers = self._board.answers(alarm, self._group.world_size)
        silent = {
            rank: Silence(process.described(), process.stacks())
            for rank, process in enumerate(self._processes)
            if rank not in answers
        }
        self._reporter.hang(format_hang(answers, silent))
        self._board.note(find_verdict(answers, silent))
