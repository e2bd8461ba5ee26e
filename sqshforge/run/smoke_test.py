"""The smoke test: `training.smoke` runs inside a packed file, and its findings are shown."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, duration
from sqshforge.run.start import require_sqsh

COMMAND = ("python3", "-m", "training.smoke", "--json")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at inside the image."""

    name: str
    ok: bool
    seconds: float
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)  # what was measured, such as losses


@dataclass(frozen=True)
class Outcome:
    """What the smoke test of one sqsh found."""

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

    A check that fails is an outcome; `WorkError` is raised where the test itself cannot run,
    `RequestError` for a file that is no sqsh.
    """
    require_sqsh(image)
    started = time.monotonic()
    argv = [sys.executable, "-m", "sqshforge", "run", str(image), "--", *COMMAND]
    with (
        reporter.track(f"smoke test of {image.name}") as tracker,
        programs.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        said = []
        for raw in process.stderr:
            said.append(raw.decode(errors="replace").rstrip())
            tracker.note(said[-1])
        output = process.stdout.read().decode(errors="replace")
        code = process.wait()
    findings = _findings(output)
    if findings is None or code not in (0, 1):
        raise WorkError(
            f"the smoke test did not run to its end (exit code {code})"
            + "".join(f"\n    {line}" for line in said[-12:]),
            where=f"{' '.join(COMMAND)}, inside {image}",
        )
    checks = tuple(_check(one) for one in findings["checks"])
    return Outcome(findings["ok"], time.monotonic() - started, checks)


def _check(found: dict[str, Any]) -> Check:
    name, ok, seconds, detail = (found.pop(key) for key in ("name", "ok", "seconds", "detail"))
    return Check(name, ok, seconds, detail, figures=found)


def recall(image: Path, key: str) -> Outcome | None:
    """The outcome of an earlier test that this very file passed, if there is one."""
    try:
        record = json.loads(_record(image).read_text())
        if record["key"] != key:
            return None
        checks = tuple(Check(**one) for one in record["checks"])
        return Outcome(record["ok"], record["seconds"], checks, remembered=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(image: Path, key: str, outcome: Outcome) -> None:
    """Note that this file passed, beside it; the note is of no worth to another file."""
    record = {"key": key, **asdict(outcome)}
    del record["remembered"]
    _record(image).write_text(json.dumps(record, indent=2) + "\n")


def _record(image: Path) -> Path:
    return image.with_name(image.name + ".smoke.json")


def _findings(output: str) -> dict[str, Any] | None:
    try:
        found = json.loads(output)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "checks" in found else None
