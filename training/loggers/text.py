"""What is printed: a line for each report or evaluation, a progress bar, and the mean speed."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from training.cli import duration
from training.loggers.base import Logger, Record
from training.loggers.console import Console

LEFT_OUT = 30
"""How many of the first steps of a start do not count."""
REPORTS = 10
"""How many of the last reports give the median time of a step."""


class TextLogger(Logger):
    """Prints a line for each report and each evaluation, and one after the first step.

    may_end_early: num_steps is only the most that the run may take, so no time left is shown.
    """

    def __init__(self, num_steps: int, console: Console, *, may_end_early: bool = False) -> None:
        self.num_steps, self.console, self.may_end_early = num_steps, console, may_end_early
        self._is_first = True
        self._seconds: deque[float] = deque(maxlen=REPORTS)  # per step, from the last reports

    def write(self, records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "step" and self._is_first:
                self._is_first = False
                self.console.say(format_first(record, self.num_steps))
            elif record["kind"] == "report":
                self.console.say(format_report(record, self.num_steps, self._left(record)))
            elif record["kind"] == "evaluation":
                self.console.say(format_evaluation(record, self.num_steps))

    def _left(self, report: Record) -> float | None:
        """Seconds to the last step, by a median: the first report includes compilation."""
        self._seconds.append(report["seconds_per_step"])
        if self.may_end_early:
            return None
        return (self.num_steps - report["step"]) * median_low(self._seconds)


class ProgressBar(Logger):
    """Moves the bar step by step; the loss behind it is that of the last report."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def write(self, records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "report" and record["loss"] is not None:
                self.console.advance(0, loss=f"{record['loss']:.4f}")

    def step(self) -> None:
        self.console.advance()

    def close(self, failed: bool) -> None:
        self.console.close()


class AverageSpeed(Logger):
    """Prints the mean speed of all steps that count, once every `interval` of them."""

    def __init__(self, interval: int, start: int, console: Console) -> None:
        self.interval, self.console = interval, console
        self._before = start  # the step of the last report
        self._first = start + LEFT_OUT + 1
        self._shown = start + LEFT_OUT
        self._steps = 0  # how many count
        self._sums = {"samples_per_second": 0.0, "tflops": 0.0}  # of steps / speed

    def write(self, records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "report":
                self._take(record)

    def _take(self, record: Record) -> None:
        steps, begin = record["step"] - self._before, self._before + 1
        self._before = record["step"]
        if begin < self._first:
            self._shown = max(self._shown, self._before)
            self._first = max(self._first, self._before + 1)
            return
        self._steps += steps
        for what in self._sums:
            self._sums[what] += steps / record[what]
        if self._before - self._shown < self.interval:
            return
        self._shown = self._before
        # All steps have the same size, so the mean speed is the harmonic mean.
        samples, tflops = (self._steps / total for total in self._sums.values())
        self.console.say(
            f"mean of steps {self._first} to {self._before}: {samples:,.2f} samples/s, "
            f"{tflops:.2f} TFLOPS/device"
        )


def format_first(record: Record, num_steps: int) -> str:
    """Format the first step of a start for people, who may be waiting for it."""
    loss = "-" if record["loss"] is None else f"{record['loss']:.4f}"
    return f"step {record['step']}/{num_steps} | loss {loss} | the first of this start"


def format_report(record: Record, num_steps: int, left: float | None) -> str:
    """Format a report for people, in at most 110 columns; left: seconds, None if not known."""
    loss, norm, mfu = (record[what] for what in ("loss", "grad_norm", "mfu"))
    parts = [
        f"step {record['step']}/{num_steps}",
        f"loss {'-' if loss is None else f'{loss:.4f}'}",
        f"norm {'-' if norm is None else _brief(norm)}",
        f"{_brief(record['seconds_per_step'])} s/step",
        f"{_brief(record['tokens_per_second'])} tokens/s",
        "" if mfu is None else f"MFU {mfu:.1%}",
        "" if left is None else f"{duration(left)} left",
    ]
    return " | ".join(part for part in parts if part)


def _brief(value: float) -> str:
    """Format a positive number briefly: 0.123, 12.3, 12,346, 966k, 12.3M."""
    if value < 999.5:
        return f"{value:#.3g}".rstrip(".")  # as many digits in each line
    if value < 100_000:
        return f"{value:,.0f}"
    return f"{value / 1e3:.0f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


def format_evaluation(record: Record, num_steps: int) -> str:
    """Format an evaluation for people."""
    label = f" {record['label']}," if "label" in record else ""
    tops = [name for name in ("top3", "top10") if name in record]
    loss, perplexity = (record[what] for what in ("loss", "perplexity"))
    return (
        f"step {record['step']}/{num_steps} | evaluation on{label} {record['tokens']:,} tokens | "
        f"loss {'-' if loss is None else f'{loss:.4f}'} | "
        f"perplexity {'-' if perplexity is None else f'{perplexity:.2f}'}"
    ) + "".join(f" | {name} {record[name]:.1%}" for name in tops)
