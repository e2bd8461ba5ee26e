"""A request to stop: SIGTERM, SIGUSR1 (which Slurm users often ask for), or one Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from training.errors import SAVED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
GRACE = 5.0
"""Seconds that the first step has to end after a request."""


class StopRequest:
    """Set by a signal, and checked between steps.

    Until the first step of a start is over there is nothing to save, and that step may take
    minutes: it compiles, reads, or adds up a thousand batches. So a process that is asked to stop
    before that, and does not finish the step soon, ends by itself with the exit code of a saved
    run. Python runs a handler only between two of its own instructions, hence the thread.

    The second Ctrl-C ends the process at once. A SIGINT that is ignored, as in the background of a
    script, stays ignored.
    """

    def __init__(self, release: Callable[[], None], rank: int) -> None:
        self.made = False
        self._release, self._rank = release, rank
        self._first_step = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in SIGNALS:
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._make)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop request", daemon=True).start()

    def first_step_is_over(self) -> None:
        """Note that there is something to save from now on."""
        if not self._first_step.is_set():
            self._first_step.set()
            signal.set_wakeup_fd(-1)
            os.close(self._write)  # ends the thread

    def _make(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            if self._rank == 0:
                with suppress(OSError):  # print must not be called again within itself
                    os.write(2, b"asked to stop, after saving; Ctrl-C again ends it at once\n")

    def _watch(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in SIGNALS and not self._first_step.wait(GRACE):
                self._leave()
        os.close(self._read)

    def _leave(self) -> None:
        if self._rank == 0:
            print("asked to stop before the first step was over: nothing is new", flush=True)
        self._release()
        sys.stderr.flush()
        os._exit(SAVED)
