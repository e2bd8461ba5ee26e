"""The last hang that hang.txt tells of."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILE = "hang.txt"
MOST = 1 << 20  # bytes of its end that are read: stacks of many ranks are long
TOLD = re.compile(r"^(?P<when>\d{4}-\d\d-\d\dT\S+)\nhang: (?P<what>.*)$", re.MULTILINE)
ENDED = "it has ended"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Who hung where, in the watch's words; over once the run has gone on."""

    when: str  # by the clock of the node that told it
    what: str
    over: bool
    changed: float  # seconds of the epoch, by the file system's clock


def read(folder: Path, reported: float) -> Hang | None:
    """The last hang of a run whose metrics.jsonl was written at `reported`; None without one."""
    path = folder / FILE
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MOST))
        told = list(TOLD.finditer(file.read().decode(errors="replace")))
        changed = path.stat().st_mtime
        hangs = [one for one in told if not one["what"].startswith(ENDED)]
        if hangs:
            return Hang(
                when=hangs[-1]["when"],
                what=hangs[-1]["what"],
                over=told[-1] is not hangs[-1] or reported > changed,
                changed=changed,
            )
    return None
