"""The folder that all nodes must see: each writes a small file, and others read it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from training.job.plan import Job

PATIENCE = 5.0
"""Seconds for a file to be seen by the other nodes after it was written and synced."""


class Shared:
    """One node's view of the folder."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self._job = folder, job
        self._place = folder / f".preflight.{job.run_id}"

    def write(self, nonce: str) -> tuple[str, list[str]]:
        """Write this node's file. Raises OSError.

        `nonce` is of this meeting alone: what an earlier one left is not taken for it.
        """
        self._place.mkdir(exist_ok=True)
        with self._file(self._job.node_rank).open("w") as file:
            file.write(self._text(nonce, self._job.node_rank))
            file.flush()
            os.fsync(file.fileno())
        return str(self.folder), []

    def unseen(self, nonce: str, ranks: Iterable[int]) -> list[int]:
        """Read the files of other nodes; those that are not there, or wrong, after `PATIENCE`.

        By their names, as NFS may go on for a minute to show a listing that it showed before.
        """
        left = list(ranks)
        until = time.monotonic() + PATIENCE
        while True:
            left = [rank for rank in left if not self._right(nonce, rank)]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.2)

    def has_come(self, rank: int) -> bool:
        """Tell whether a node of this start has written its file, and is not through."""
        return self._file(rank).exists()

    def remove(self) -> None:
        """Take this node's file away, and the place of all with the last one."""
        with contextlib.suppress(OSError):
            self._file(self._job.node_rank).unlink(missing_ok=True)
            self._place.rmdir()

    def remove_earlier(self) -> None:
        """Take away what starts before this one left when they were killed."""
        for place in self.folder.glob(f".preflight.{self._job.id}.*"):
            if place != self._place:
                shutil.rmtree(place, ignore_errors=True)

    def _file(self, rank: int) -> Path:
        return self._place / str(rank)

    def _text(self, nonce: str, rank: int) -> str:
        return f"{self._job.run_id} {rank} {nonce}\n"

    def _right(self, nonce: str, rank: int) -> bool:
        try:
            return self._file(rank).read_text() == self._text(nonce, rank)
        except (OSError, UnicodeDecodeError):
            return False


class BadNodes:
    """The file that tells the launcher which nodes to leave out next time."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.path = folder / f"bad-nodes.{job.run_id}"
        self._found = self._stamp()

    def write(self, hosts: Iterable[str]) -> None:
        """Put the hosts there, a line each, at once; without any, there is no file. Raises OSError.

        What an earlier start of the job wrote is not of this one.
        """
        lines = "".join(f"{host}\n" for host in hosts)
        if not lines:
            self.path.unlink(missing_ok=True)
            return
        staging = self.path.with_name(f"{self.path.name}.{os.urandom(4).hex()}")
        try:
            with staging.open("w") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(self.path)
        finally:
            staging.unlink(missing_ok=True)

    def is_news(self) -> bool:
        """Tell whether another node has written it since this one began."""
        return self._stamp() not in (None, self._found)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
