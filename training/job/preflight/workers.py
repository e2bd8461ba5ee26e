"""A node's workers: processes that use its devices, one for each process of the training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import IO, Any

from training.job.children import signal_name

PROGRAM = ("-m", "training.job.preflight.worker")
ENDING = 10.0
"""Seconds that a worker has to end before it is killed."""

_CHATTER = re.compile(r"\[[IW]\d{4} ")  # torch's log lines, which do not explain its end


class Workers:
    """Starts workers, gives them orders, and ends them. Use it in a `with`."""

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.size = size
        self._environment = dict(environment)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        """Start the workers without waiting for the seconds in which they load torch."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, orders: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
        """Give each order to a worker, by rank; return the answers, with `fault` for a failure.

        If a worker does not answer in time, or is of no more use, all are started anew.
        """
        until = time.monotonic() + seconds
        asked = self._workers[: len(orders)]
        for worker, order in zip(asked, orders, strict=True):
            worker.order(order)
        answers = [worker.answer(until, seconds) for worker in asked]
        if any(answer.get("spent") for answer in answers):
            self.stop()
            self._start()
        return answers

    def stop(self) -> None:
        """End the workers; when this returns they hold no device."""
        for worker in self._workers:
            worker.release()
        until = time.monotonic() + ENDING
        for worker in self._workers:
            worker.end(until)
        self._workers = []

    def _start(self) -> None:
        self._workers = [_Worker(rank, self._environment) for rank in range(self.size)]


class _Worker:
    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self._rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        answers, descriptor = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, *PROGRAM, str(rank), str(descriptor)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            pass_fds=[descriptor],
        )
        os.close(descriptor)
        self._answers: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, args=(answers,), daemon=True).start()

    def order(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the worker has ended: there will be no answer
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def answer(self, until: float, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return self._spent(f"no answer within {seconds:.0f} s")
        if not line:
            code = self._process.wait()
            how = f"exit code {code}" if code >= 0 else signal_name(-code)
            return self._spent(f"ended by {how}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def release(self) -> None:
        """Close the input, at which the worker ends; `end` kills one that hangs."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self, until: float) -> None:
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            # A process that waits in the kernel for a broken device does not die: leave it behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING)
        self._log.close()

    def _spent(self, what: str) -> dict[str, Any]:
        said = self._said()
        return {"fault": f"{what}: {said}" if said else what, "spent": True}

    def _said(self) -> str:
        """The last line that the worker wrote to its log."""
        # Not with seek(): the process shares the position in the file.
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), 4096, max(0, size - 4096))
        lines = data.decode(errors="replace").split("\n")
        output = [line.strip() for line in lines if not _CHATTER.match(line)]
        return next((line[:200] for line in reversed(output) if line), "")

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")
