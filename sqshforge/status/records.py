"""Read the records in a run's folder: the end of a file of JSON lines, and config.json."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BLOCK = 1 << 18  # bytes to read at once
LARGEST = 1e100  # keeps products of numbers, and sums of their squares, finite
LATEST = 1 << 37  # seconds of the epoch: the year 6325
MOST = 1 << 24  # most bytes to read, about 100,000 steps: a file may have gigabytes

Record = dict[str, Any]

SETTINGS_FILE = "config.json"
SETTINGS_LIMIT = 1 << 20  # most bytes of the settings file
LENGTH = re.compile(r"(?P<value>(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)(?P<unit>tok|ba)", re.IGNORECASE)


def opened(path: Path) -> IO[bytes]:
    """Open a run's file for reading; `OSError` if it is not a regular file.

    The run may be another user's: opening a pipe could block, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file", str(path))


def blocks(path: Path, block: int = BLOCK, most: int = MOST) -> Iterator[list[bytes]]:
    """Yield the complete lines at the end of a file, block by block, the last block first.

    A last line without a newline is being written, or was cut off, and is left out. A file that is
    missing or cannot be read has no lines. At most `most` bytes are read.
    """
    try:
        with opened(path) as file:
            place = file.seek(0, os.SEEK_END)
            least = max(0, place - most)
            rest, ended = b"", False  # of a line that begins in an earlier block; saw a newline
            while place > least:
                begin = max(least, place - block)
                file.seek(begin)
                data = file.read(place - begin)
                place = begin
                if not ended:
                    ended = b"\n" in data
                    data = data[: data.rfind(b"\n")] if ended else b""
                if not ended:
                    continue
                lines = (data + rest).split(b"\n")
                rest = lines.pop(0) if begin else b""
                yield lines
    except OSError:
        return


def parse_record(line: bytes) -> Record | None:
    """Parse a line's record; None if it is not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or nested a thousand deep
        return None
    return record if isinstance(record, dict) else None


def last_records(path: Path, most: int = MOST) -> list[Record]:
    """Return all records in the last `most` bytes of a file, in order."""
    lines = [line for part in reversed(list(blocks(path, most=most))) for line in part]
    return [record for line in lines if (record := parse_record(line)) is not None]


def number(value: Any) -> float | None:
    """Return a number that is safe to calculate with, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= LARGEST else None


def whole(value: Any) -> int | None:
    """Return an integer that fits into 64 bits, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 1 << 63 else None


def moment(value: Any) -> float | None:
    """Return seconds of the epoch that make a valid date, or None for any other value."""
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < LATEST else None


def read_document(path: Path, most: int = MOST) -> Record | None:
    """Read a file with one JSON object; None if it is missing, too large or something else."""
    try:
        with opened(path) as file:
            text = file.read(most + 1)
    except OSError:
        return None
    return parse_record(text) if len(text) <= most else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run that are shown; None for those that the file does not have."""

    model: str = ""
    num_steps: int | None = None
    world_size: int | None = None  # processes, each with one device
    report_interval: int = 1  # steps
    evaluates: bool = False
    short: str = ""  # the setting that may end a run before num_steps


def has_settings(folder: Path) -> bool:
    """Whether a folder has the config.json of a run, and not, for example, of a model."""
    return _record(folder) is not None


def read_settings(folder: Path) -> Settings:
    """Read the settings that a run's last start wrote; defaults if there are none."""
    record = _record(folder)
    if record is None:
        return Settings()
    sections = {name: part for name, part in record["config"].items() if isinstance(part, dict)}
    world_size = whole(record.get("world_size"))
    return (
        _composer(sections, world_size) if "scheduler" in sections else _own(sections, world_size)
    )


def _record(folder: Path) -> Record | None:
    record = read_document(folder / SETTINGS_FILE, SETTINGS_LIMIT)
    return record if record and isinstance(record.get("config"), dict) else None


def _own(sections: dict[str, dict[str, Any]], world_size: int | None) -> Settings:
    run, data = sections.get("run", {}), sections.get("data", {})
    short = ""
    if data.get("epochs"):
        short = f"epochs={data['epochs']}"
    if run.get("compile_only"):
        short = "compile_only"
    return Settings(
        model=str(sections.get("model", {}).get("name", "")),
        num_steps=whole(run.get("num_steps")),
        world_size=world_size,
        report_interval=whole(run.get("report_interval")) or 1,
        evaluates=bool(data.get("eval_dataset_path")),
        short=short,
    )


def _composer(sections: dict[str, dict[str, Any]], world_size: int | None) -> Settings:
    """Read Composer's settings: the last step reaches t_max; a sample has seq_len + 1 tokens."""
    data = sections.get("data", {})
    found = LENGTH.fullmatch(str(sections["scheduler"].get("t_max", "")))
    value = number(float(found["value"])) if found else None
    batch, length = whole(data.get("global_batch_size")), whole(data.get("seq_len"))
    steps = None
    if found and value is not None and found["unit"].lower() == "ba":
        steps = int(value)
    elif value is not None and batch and length and length > 0:
        steps = math.ceil(value / (batch * (length + 1)))
    return Settings(
        model=str(sections.get("general", {}).get("full_name", "")),
        num_steps=whole(steps),
        world_size=world_size,
        evaluates=bool(data.get("eval_paths")),
    )
