"""How far the ranks of a node have come, for the program that has started them.

A rank may be gone at any moment, so it notes each step in an anonymous file (memfd) of that
program, to which STEP_NOTES points: nothing is left on a disk, and a note costs some microseconds.
Only the first rank of a node notes; all are at the same step.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass

VARIABLE = "STEP_NOTES"
_LAYOUT = struct.Struct("<qqdddd")
_NOTHING_READ = -1.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the ranks of one start have noted; times are seconds since the epoch."""

    resumed: int  # the step that they went on from
    last: int  # the last step that was taken
    first_at: float = 0.0  # when their first step was over; 0: not yet
    last_at: float = 0.0
    read: float = 0.0  # seconds of reading the checkpoint that they went on from
    in_memory: float | None = None  # share of it that came from memory; None: none was read

    @property
    def seconds(self) -> float | None:
        """Seconds per step; None if fewer than two were taken."""
        steps = self.last - self.resumed - 1
        return (self.last_at - self.first_at) / steps if steps > 0 else None


class StepNotes:
    """Notes the steps of a rank; does nothing, without an error, if nobody has asked for it."""

    def __init__(self, resumed: int, read: float = 0.0, in_memory: float | None = None) -> None:
        """Note that the ranks are ready to go on after step `resumed`; the rest as in Steps."""
        self._resumed, self._first_at, self._file = resumed, 0.0, -1
        self._read = (read, _NOTHING_READ if in_memory is None else in_memory)
        if os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get(VARIABLE):
            with suppress(OSError):
                self._file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CLOEXEC)
        self._write(resumed, 0.0)

    def taken(self, step: int) -> None:
        """Note that a step was taken."""
        now = time.time()
        self._first_at = self._first_at or now
        self._write(step, now)

    def _write(self, step: int, now: float) -> None:
        if self._file >= 0:
            with suppress(OSError):
                note = _LAYOUT.pack(self._resumed, step, self._first_at, now, *self._read)
                os.pwrite(self._file, note, 0)


class StepReader:
    """The file in which the ranks of this node note their steps, and what it says."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Make the file, and name it in `environment` for the processes started with that."""
        self._file = os.memfd_create("steps")
        environment[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}"

    def clear(self) -> None:
        """Forget the notes of ranks that are gone."""
        os.ftruncate(self._file, 0)

    def read(self) -> Steps | None:
        """Return what was noted since; None if the ranks are not ready yet."""
        note = os.pread(self._file, _LAYOUT.size, 0)
        if len(note) < _LAYOUT.size:
            return None
        resumed, last, first_at, last_at, read, in_memory = _LAYOUT.unpack(note)
        return Steps(
            resumed=resumed,
            last=last,
            first_at=first_at,
            last_at=last_at,
            read=read,
            in_memory=None if in_memory == _NOTHING_READ else in_memory,
        )
