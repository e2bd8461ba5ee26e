"""The smoke test: run `training.smoke` inside a packed file and show its findings."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from sqshforge import platforms
from sqshforge.errors import WorkError
from sqshforge.host import emulation
from sqshforge.host.files import parse_object, read_object
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, duration
from sqshforge.run import passed
from sqshforge.run.start import require_sqsh
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.image import open_image
from sqshforge.squashfs.inode import FILE

COMMAND = ("python3", "-m", "training.smoke", "--json")
LAST = 12  # lines of a failed test's output that the error shows
# The errors raised for invalid JSON, and for JSON of an unexpected form.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
STEP = re.compile(
    r"\[(?P<number>\d{1,4}) of (?P<count>\d{1,4}), (?P<percent>\d{1,2})%\] (?P<name>.+)"
)
ENOUGH = 5.0  # percent that must be done before the time left is estimated
LINE = 1 << 12  # bytes read at once; a line from the image may be endless
LONGEST = 1 << 24  # bytes kept of findings


@dataclass(frozen=True)
class Check:
    """The result of one check inside the image."""

    name: str
    ok: bool
    seconds: float
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)  # measurements, such as losses


@dataclass(frozen=True)
class Outcome:
    """The findings of the smoke test of one sqsh."""

    ok: bool
    seconds: float
    checks: tuple[Check, ...]
    remembered: bool = False

    def table(self) -> Table:
        table = Table("check", "result", "time", "detail", box=None, pad_edge=False)
        for check in self.checks:
            result = "ok" if check.ok else "FAILED"
            table.add_row(check.name, result, duration(check.seconds), check.detail)
        return table


def run(image: Path, programs: Programs, reporter: Reporter) -> Outcome:
    """Run the smoke test inside a sqsh.

    A failed check is part of the outcome. Raises `WorkError` if the test itself cannot run,
    `RequestError` if the file is not a sqsh.
    """
    require_sqsh(image)
    _require_machine(image, programs)
    started = time.monotonic()
    passed.forget_coerced()
    argv = [sys.executable, "-m", "sqshforge", "run", str(image), "--", *COMMAND]
    with (
        reporter.track(f"smoke test of {image.name}", unit="") as tracker,
        programs.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        # Read both pipes at once: an image that fills one while we wait for the other would hang.
        output = bytearray()
        reader = threading.Thread(target=_read, args=(process.stdout, output), daemon=True)
        reader.start()
        said: deque[str] = deque(maxlen=LAST)
        while raw := process.stderr.readline(LINE):
            said.append(raw.decode(errors="replace").rstrip())
            percent, doing = progress(said[-1], time.monotonic() - started)
            if percent is not None:
                tracker.set(percent, 100)
            tracker.note(doing)
        reader.join()
        code = process.wait()
    findings = _findings(bytes(output))
    if findings is None or code not in (0, 1):
        raise WorkError(
            f"the smoke test did not run to its end (exit code {code})"
            + "".join(f"\n    {line}" for line in said),
            where=f"{' '.join(COMMAND)}, inside {image}",
        )
    ok, checks = findings
    return Outcome(ok, time.monotonic() - started, checks)


def progress(line: str, elapsed: float) -> tuple[float | None, str]:
    """Parse a line of the running test: the percentage done, and the text to show.

    The percentage is None for a line that does not state it.
    """
    found = STEP.fullmatch(line)
    if found is None:
        return None, line
    percent = float(found["percent"])
    left = f", {elapsed * (100 - percent) / percent:.0f} s left" if percent >= ENOUGH else ""
    return percent, f"{found['number']} of {found['count']}{left}: {found['name']}"


def _require_machine(image: Path, programs: Programs) -> None:
    """Raise `RequestError` for an image of another platform that is not emulated here."""
    with open_image(image) as opened:
        shell = opened.find(b"bin/sh")
        if shell is None or shell.kind != FILE:
            return
        head = next(Content(opened).pieces(shell), b"")
    built_for = platforms.ALL.get(platforms.of_program(head))
    if built_for is not None and not emulation.runs(built_for, programs):
        raise platforms.not_for_this_machine(str(image), built_for.name)


def _read(stream: IO[bytes], into: bytearray) -> None:
    """Read a stream to its end; keep at most `LONGEST` bytes."""
    while piece := stream.read(1 << 16):
        into += piece[: max(LONGEST - len(into), 0)]


def _findings(output: bytes) -> tuple[bool, tuple[Check, ...]] | None:
    """Parse the output of an image's test; None if it is not valid."""
    found = parse_object(output) or {}
    try:
        ok, checks = found["ok"], tuple(_check(dict(one)) for one in found["checks"])
    except UNREADABLE:
        return None
    return (ok, checks) if isinstance(ok, bool) else None


def _check(found: dict[str, Any]) -> Check:
    """Parse a check; raises `ValueError` or `KeyError` for an invalid one."""
    name, ok, seconds, detail = (found.pop(key) for key in ("name", "ok", "seconds", "detail"))
    wanted = ((name, str), (ok, bool), (seconds, (int, float)), (detail, str))
    if not all(isinstance(value, kind) for value, kind in wanted) or not math.isfinite(seconds):
        raise ValueError("unexpected type in a check")
    return Check(name, ok, seconds, detail, figures=found)


def recall(image: Path, key: str) -> Outcome | None:
    """The recorded outcome of an earlier test that the file with this key passed, if any."""
    record = read_object(_record(image))
    try:
        if record is None or record["key"] != key:
            return None
        checks = [_check({**one.pop("figures"), **one}) for one in record["checks"]]
        return Outcome(record["ok"] is True, float(record["seconds"]), tuple(checks), True)
    except UNREADABLE:
        return None


def remember(image: Path, key: str, outcome: Outcome) -> None:
    """Record beside a file that it passed; the record is not valid for any other file.

    If it cannot be written, the file is tested again the next time.
    """
    record = {"key": key, **asdict(outcome)}
    del record["remembered"]
    with suppress(OSError):
        _record(image).write_text(json.dumps(record, indent=2) + "\n")


def _record(image: Path) -> Path:
    return image.with_name(image.name + ".smoke.json")
