"""The progress and speed of a run, from the end of its metrics.jsonl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqshforge.status.records import Record, Settings, blocks, number, parse_record, whole

FILE = "metrics.jsonl"
STEPS = 1000  # the number of last steps whose losses give the trend
REPORTS = 10  # the number of last reports whose median is the speed
SURE = 2.0  # how many standard errors a slope must exceed to count


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The trend of the loss: its means over the older and the newer half of the last steps."""

    steps: int
    before: float
    now: float
    word: str  # falling, rising, level


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation; `label` names its data if there are several sets."""

    step: int
    loss: float | None
    perplexity: float | None
    tokens: int | None
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run; None for values that its lines do not have.

    The speeds are medians of the last reports, and the seconds per step follow from them: these
    times include no evaluations, and checkpoints only as far as training waits for them.
    """

    step: int = 0
    tokens_seen: int | None = None
    loss: float | None = None  # of the last step
    trend: Trend | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    left_out: int = 0  # last steps skipped for a loss or gradient that was not finite
    reports: int = 0  # number of reports behind the speeds
    tokens_per_second_per_device: float | None = None
    tokens_per_second: float | None = None  # of all devices
    mfu: float | None = None  # share of the devices' peak
    memory_bytes: int | None = None  # peak
    seconds_per_step: float | None = None
    evaluations: tuple[Evaluation, ...] = ()  # of the last step that has any

    def seconds_left(self, num_steps: int | None, quiet: float) -> float | None:
        """Estimate the seconds to the last step, the last line being `quiet` seconds old."""
        if num_steps is None or self.seconds_per_step is None:
            return None
        return max(0.0, (num_steps - self.step) * self.seconds_per_step - quiet)


def read(folder: Path, settings: Settings) -> Progress:
    """Read a bounded part of the end of a run's metrics.jsonl, however long it is."""
    steps, reports, evaluations = _last(folder / FILE, settings.evaluates)
    steps, reports = steps[-STEPS:], reports[-REPORTS:]
    last = (steps or reports or [{}])[-1]
    losses = [value for one in steps if (value := number(one.get("loss"))) is not None]
    rate = _median(reports, "tokens_per_second_per_device")
    overall = rate * settings.world_size if rate and settings.world_size else None
    tokens = _tokens_of_a_step(steps or reports)
    return Progress(
        step=last.get("step", 0),
        tokens_seen=whole(last.get("tokens_seen")),
        loss=number(last.get("loss")),
        trend=_trend(losses),
        grad_norm=number(last.get("grad_norm")),
        learning_rate=number(last.get("learning_rate")),
        left_out=sum(1 for one in steps if one.get("skipped")),
        reports=len(reports),
        tokens_per_second_per_device=rate,
        tokens_per_second=overall,
        mfu=_median(reports, "mfu"),
        memory_bytes=whole(reports[-1].get("memory_bytes")) if reports else None,
        seconds_per_step=number(tokens / overall) if tokens and overall else None,
        evaluations=_evaluations(evaluations),
    )


def _last(path: Path, evaluates: bool) -> tuple[list[Record], list[Record], list[Record]]:
    """Return the last steps, reports and evaluations, each kind in order.

    Usually the last block has them all. Earlier blocks are only searched for kinds still missing.
    """
    found: dict[str, list[Record]] = {"step": [], "report": [], "evaluation": []}
    wanted = ["step", "report", "evaluation"] if evaluates else ["step", "report"]
    for lines in blocks(path):
        records = [record for line in lines if (record := _record(line, wanted)) is not None]
        for kind in wanted:
            found[kind] = [one for one in records if one["kind"] == kind] + found[kind]
        wanted = [kind for kind in wanted if not found[kind]]
        if not wanted:
            break
    return found["step"], found["report"], found["evaluation"]


def _record(line: bytes, wanted: list[str]) -> Record | None:
    """Return a line's record if it is of a wanted kind; parsing all lines would take too long.

    `wanted` is a list, as the kind in a file may be unhashable.
    """
    if not any(kind.encode() in line for kind in wanted):
        return None
    record = parse_record(line)
    if record is None or record.get("kind") not in wanted or whole(record.get("step")) is None:
        return None
    return record


def _median(reports: Sequence[Record], name: str) -> float | None:
    values = [value for one in reports if (value := number(one.get(name))) is not None]
    return statistics.median(values) if values else None


def _tokens_of_a_step(records: Sequence[Record]) -> float | None:
    """Return the tokens per step between the last two records; with only one, the mean so far."""
    if not records:
        return None
    last, before = records[-1], records[-2] if len(records) > 1 else {}
    steps = last["step"] - before.get("step", 0)
    tokens = (number(last.get("tokens_seen")) or 0) - (number(before.get("tokens_seen")) or 0)
    return tokens / steps if steps > 0 and tokens > 0 else None


def _trend(losses: Sequence[float]) -> Trend | None:
    """Tell whether a regression line through these losses has a slope; None for fewer than ten."""
    half = len(losses) // 2
    if half < 5:
        return None
    losses = losses[-2 * half :]
    line = statistics.linear_regression(range(2 * half), losses)
    rest = [loss - line.intercept - line.slope * at for at, loss in enumerate(losses)]
    spread = 2 * half * statistics.pvariance(range(2 * half))
    error = math.sqrt(math.fsum(one * one for one in rest) / (2 * half - 2) / spread)
    word = "level"
    if abs(line.slope) > SURE * error:
        word = "falling" if line.slope < 0 else "rising"
    before, now = statistics.fmean(losses[:half]), statistics.fmean(losses[half:])
    return Trend(steps=2 * half, before=before, now=now, word=word)


def _evaluations(records: Sequence[Record]) -> tuple[Evaluation, ...]:
    return tuple(
        Evaluation(
            step=one["step"],
            loss=number(one.get("loss")),
            perplexity=number(one.get("perplexity")),
            tokens=whole(one.get("tokens")),
            label=str(one.get("label", "")),
        )
        for one in records
        if one["step"] == records[-1]["step"]
    )
