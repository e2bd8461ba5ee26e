"""Read what a run has reported so far: its metrics.jsonl and config.json, in whatever state.

No torch here, so that it can be read where torch is not installed.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.errors import RequestError

METRICS = "metrics.jsonl"
CONFIG = "config.json"
X = ("step", "tokens_seen", "training_seconds")
"""What a line may be drawn over; the last is not a field of a line, but derived (`_clock`)."""
STEP = (*X, "loss", "grad_norm", "learning_rate")
REPORT = (
    *(*X, "tokens_per_second_per_device", "seconds_per_step", "mfu", "memory_bytes", "data_wait"),
)
EVALUATION = (*X, "loss")
SAVE = (*X, "seconds", "waited")


@dataclass(frozen=True)
class Table:
    """Lines of one kind as columns, in the order of their steps; NaN for what a line lacks."""

    columns: dict[str, array[float]]

    @classmethod
    def of(cls, *names: str) -> Table:
        return cls({name: array("d") for name in names})

    def __len__(self) -> int:
        return len(self.columns["step"])

    def add(self, record: dict[str, Any]) -> int:
        """Add a line, which replaces those from its step on; return how many those were.

        Raises ValueError for a line without a step, or with something that should be a number and
        is not; OverflowError for a whole number that no float holds.
        """
        row = {name: _number(record.get(name)) for name in self.columns}
        if not row["step"] >= 1:
            raise ValueError("no step")
        replaced = self.cut(row["step"])
        for name, column in self.columns.items():
            column.append(row[name])
        return replaced

    def cut(self, step: float) -> int:
        """Remove the lines from a step on; return how many they were."""
        kept = bisect_left(self.columns["step"], step)
        removed = len(self) - kept
        for column in self.columns.values():
            del column[kept:]
        return removed

    def finite(self, name: str) -> list[float]:
        return [value for value in self.columns[name] if math.isfinite(value)]

    def has(self, *names: str) -> bool:
        """Return whether some line has finite numbers in all of these columns."""
        rows = zip(*(self.columns[name] for name in names), strict=True)
        return any(all(map(math.isfinite, row)) for row in rows)


@dataclass(frozen=True)
class Run:
    """One run; `notes` tell people what is odd about it.

    evaluations: a table for each held-out set by its label, which is empty if lines have none.
    """

    name: str
    steps: Table
    reports: Table
    evaluations: dict[str, Table]
    saves: Table
    settings: dict[str, Any] = field(default_factory=dict)  # of config.json, by dotted names
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of model, batch and image
    notes: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        return int(self.steps.columns["step"][-1]) if len(self.steps) else 0

    @property
    def tokens(self) -> float:
        return self.steps.columns["tokens_seen"][-1] if len(self.steps) else 0

    @property
    def lost(self) -> list[int]:
        """The steps whose loss is not a finite number; training may have skipped them."""
        pairs = zip(self.steps.columns["step"], self.steps.columns["loss"], strict=True)
        return [int(step) for step, loss in pairs if not math.isfinite(loss)]


def read_runs(folders: list[Path]) -> list[Run]:
    """Read runs, named by as much of the ends of their paths as distinguishes them.

    Raises RequestError listing every folder that holds no run or was given twice, and if none of
    the runs has reached a step.
    """
    found = []
    places: list[Path] = []  # of those that are runs
    for folder in folders:
        if fault := _fault(folder):
            found.append(f"{folder}: {fault}")
        elif folder.resolve() in places:
            found.append(f"{folder}: was given twice")
        else:
            places.append(folder.resolve())
    if found:
        raise RequestError.of(found)
    names = _names(places)
    runs = [read(folder, shown(name)) for folder, name in zip(folders, names, strict=True)]
    if not any(len(run.steps) for run in runs):
        raise RequestError(
            f"there is nothing to draw yet: {', '.join(map(str, folders))} "
            f"{'has' if len(folders) == 1 else 'have'} no whole line about a step"
        )
    return runs


def shown(text: str) -> str:
    """Replace what is not a character, as in a name that is not UTF-8, by U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def _fault(folder: Path) -> str:
    """Return why a path is not a run's folder; empty if it is one."""
    try:
        if not folder.is_dir():
            return "is not a folder" if folder.exists() else "does not exist"
        if not (folder / METRICS).is_file() and not (folder / CONFIG).is_file():
            return f"has no {METRICS}; a run's folder is the one it saves to"
    except OSError as error:  # such as a folder that this user may not enter
        return f"cannot be read: {error.strerror}"
    return ""


def read(folder: Path, name: str) -> Run:
    """Read one run's folder. Raises RequestError if a file cannot be opened."""
    steps, reports, saves = Table.of(*STEP), Table.of(*REPORT), Table.of(*SAVE)
    tables = {"step": steps, "report": reports, "save": saves}
    evaluations: dict[str, Table] = {}
    notes: list[str] = []
    odd = back = 0
    for line in _lines(folder / METRICS):
        if not line.endswith(b"\n"):
            notes.append("the last line is not whole: the run goes on, or was killed")
            break
        try:
            record = json.loads(line)
            table = tables.get(record["kind"])
            if record["kind"] == "evaluation":
                table = evaluations.setdefault(
                    shown(str(record.get("label", ""))), Table.of(*EVALUATION)
                )
            replaced = table.add(record) if table is not None else 0
        except (ValueError, TypeError, KeyError, OverflowError):
            odd += 1
        else:
            if replaced and table is steps:
                back += 1
                for other in (reports, saves, *evaluations.values()):
                    other.cut(record["step"])
    if odd:
        notes.append(f"lines of {METRICS} that cannot be read, and are left out: {odd}")
    if back:
        notes.append(f"goes back to an earlier step, where the later lines count: {back} times")
    evaluations = evaluations or {"": Table.of(*EVALUATION)}
    for table in (saves, *evaluations.values()):
        for place, step in enumerate(table.columns["step"]):
            at = bisect_left(steps.columns["step"], step)
            if at < len(steps):
                table.columns["tokens_seen"][place] = steps.columns["tokens_seen"][at]
    settings, versions, facts = _config(folder / CONFIG, notes)
    clock = _clock(steps, reports, settings.get("world_size"))
    for table in (*tables.values(), *evaluations.values()):
        table.columns["training_seconds"] = clock(table.columns["step"])
    run = Run(name, steps, reports, evaluations, saves, settings, versions, facts)
    if not len(steps):
        notes.append("has not reported a step yet")
    if run.lost:
        count = f"{len(run.lost)} steps, the first of them {run.lost[0]}"
        notes.append(f"the loss is not a finite number in {count}")
    return replace(run, notes=tuple(notes))


def differing(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, with each run's value; for one run, all settings.

    None stands for a setting that a run does not state. Where a run saves is left out.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = {name: [run.settings.get(name) for run in runs] for name in names}
    return {
        name: values
        for name, values in rows.items()
        if name != "run.save_ckpt_path" and (len(runs) == 1 or values != values[:1] * len(runs))
    }


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error


def _begin(steps: Table) -> tuple[float, float]:
    """Return the steps and tokens before the first line: another run's, by load_ckpt_path."""
    if not len(steps) or steps.columns["step"][0] == 1:
        return 0.0, 0.0
    step, *after = steps.columns["step"][:2]
    tokens, *then = steps.columns["tokens_seen"][:2]
    each = (then[0] - tokens) / (after[0] - step) if after else math.nan
    return step - 1, tokens - each


def _clock(taken: Table, reports: Table, ranks: Any) -> Callable[[array[float]], array[float]]:
    """Make a function that turns steps into seconds of training so far.

    These are the seconds of the run's own steps only, added up over all its starts: without
    start-up, evaluations, and the time between two starts. A report states how long each of its
    steps took; for steps that no report covers, as after a restart, the next one counts. Reports of
    older runs imply it by their speed, on `ranks` ranks. NaN if no report states it.
    """
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else math.nan
    begin, tokens = _begin(taken)
    steps, seconds, each = [begin], [0.0], math.nan
    columns = ("step", "tokens_seen", "seconds_per_step", "tokens_per_second_per_device")
    for step, seen, recorded, speed in zip(*(reports.columns[one] for one in columns), strict=True):
        count = step - steps[-1]
        if count <= 0:  # a report of steps whose own lines are gone
            continue
        if not math.isfinite(recorded) and speed > 0:
            recorded = (seen - tokens) / count / speed / ranks
        if math.isfinite(recorded) and recorded > 0:
            each = recorded
            steps.append(step)
            seconds.append(seconds[-1] + count * each)
            tokens = seen

    def clock(wanted: array[float]) -> array[float]:
        times = array("d")
        for step in wanted:
            step = max(step, begin)
            at = bisect_left(steps, step, 1)
            if at == len(steps):  # after the last report
                times.append(seconds[-1] + (step - steps[-1]) * each)
            else:
                share = (step - steps[at - 1]) / (steps[at] - steps[at - 1])
                times.append(seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))
        return times

    return clock


def _config(
    path: Path, notes: list[str]
) -> tuple[dict[str, Any], dict[str, str], dict[str, dict[str, Any]]]:
    """Return settings by dotted names, versions, and other facts, as the last start wrote them."""
    try:
        record = json.loads(b"".join(_lines(path)))
        settings = _flat(record["config"]) | {"world_size": record["world_size"]}
        versions = {str(name): str(value) for name, value in record["versions"].items()}
        facts = {
            name: record[name]
            for name in ("model", "batch", "image")
            if isinstance(record.get(name), dict)
        }
        return settings, versions, facts
    except (ValueError, TypeError, KeyError, AttributeError):
        notes.append(f"{CONFIG} {'cannot be read' if path.exists() else 'is missing'}")
        return {}, {}, {}


def _flat(record: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= (
            _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
        )
    return flat


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("not a number")
    return float(value)


def _names(folders: list[Path]) -> list[str]:
    """Return the ends of paths, all different, with as few parts as keep them different."""
    most = max(len(folder.parts) for folder in folders)
    for count in range(1, most):
        names = [str(Path(*folder.parts[-count:])) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
