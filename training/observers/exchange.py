"""What the ranks tell each other about a hang, in a thread that may wait for the store."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from training.observers.board import Board
from training.observers.hang_report import Answer, Silence, report, verdict
from training.observers.heartbeat import Mark, Marks
from training.observers.process import Process, present_itself
from training.observers.stacks import WATCHING, own_stacks
from training.observers.tell import Tell
from training.process_group import Group

LAST = 1.0
"""Seconds that a call of the store gets to end, when the run is over."""


class Exchange:
    """Raises alarms and answers those of other ranks; making it is a collective call.

    `heard` is when the store answered last. The process that holds it may be the one that hangs,
    and then a call of the store may never return; so nothing here is waited for.
    """

    def __init__(self, group: Group, marks: Marks, interval: float, tell: Tell) -> None:
        self._group, self._marks, self._interval, self._tell = group, marks, interval, tell
        self._board = Board(group)
        self._processes: list[Process] = [present_itself()] * group.world_size
        dist.all_gather_object(self._processes, self._processes[group.rank], group=group.control)
        self._over = threading.Event()
        self._answered = 0  # alarms
        self._told: Mark | None = None  # where this rank was when it last answered
        self._wanted = False
        self.heard = time.monotonic()
        self.verdict = ""  # of the last report that any rank has made
        self._thread = threading.Thread(target=self._run, name=f"{WATCHING}-exchange", daemon=True)
        self._thread.start()

    def raise_alarm(self) -> None:
        """Ask all ranks where they are; one will tell."""
        self._wanted = True

    def close(self) -> None:
        """End the talk, before the store goes away."""
        self._over.set()
        self._thread.join(LAST)

    def tell_alone(self) -> None:
        """Tell what this rank knows without the store, which rank 0, or torchrun by it, holds."""
        silent = {}
        if self._group.rank:
            told = f"{self._processes[0].told()}; nor does the store that is kept there"
            silent[0] = Silence(told, self._processes[0].stacks())
        self._tell.hang(report({self._group.rank: self._answer()}, silent))

    def is_first(self, task: str) -> bool:
        """Tell one of the ranks that ask that it is to do a task; all, if the store is gone."""
        try:
            return self._board.first(task)
        except RuntimeError:
            return True

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._talk()
                self.heard = time.monotonic()
            except RuntimeError:  # of the store; `heard` tells
                continue

    def _talk(self) -> None:
        if self._wanted:
            # A rank with longer steps waits longer: what it sees then has been told already.
            if self._marks.last != self._told:
                self._board.raise_alarm(self._answered)
            self._wanted = False
        alarm = self._board.alarms()
        if alarm > self._answered:
            self._answered, self._told = alarm, self._marks.last
            self._board.answer(alarm, self._group.rank, self._answer())
            if self._board.first(f"report/{alarm}"):
                self._report(alarm)
        if self._answered:
            self.verdict = self._board.noted()

    def _answer(self) -> Answer:
        mark = self._marks.last
        idle = time.monotonic() - mark.since
        return Answer(mark.step, mark.number, mark.place, idle, own_stacks())

    def _report(self, alarm: int) -> None:
        """Wait for the answers of the others and tell what is known."""
        time.sleep(2 * self._interval + 1)  # each looks once an interval
        answers = self._board.answers(alarm, self._group.world_size)
        silent = {
            rank: Silence(process.told(), process.stacks())
            for rank, process in enumerate(self._processes)
            if rank not in answers
        }
        self._tell.hang(report(answers, silent))
        self._board.note(verdict(answers, silent))
