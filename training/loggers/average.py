"""A line now and then with the mean speed of a start, without its first steps, which are slower."""

from __future__ import annotations

from training.loggers.console import Console
from training.loggers.outlet import Outlet, Record

LEFT_OUT = 30
"""Steps of a start that do not count."""


class Average(Outlet):
    """Prints the mean speed of all steps that count, every `interval` of them."""

    def __init__(self, interval: int, start: int, console: Console) -> None:
        self.interval, self.console = interval, console
        self._before = start  # the step that the last report was of
        self._first = start + LEFT_OUT + 1
        self._told = start + LEFT_OUT
        self._steps = 0  # that count
        self._sums = {"samples_per_second": 0.0, "tflops": 0.0}  # of steps / speed

    def write(self, records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "report":
                self._take(record)

    def _take(self, record: Record) -> None:
        steps, begin = record["step"] - self._before, self._before + 1
        self._before = record["step"]
        if begin < self._first:
            self._told = max(self._told, self._before)
            self._first = max(self._first, self._before + 1)
            return
        self._steps += steps
        for what in self._sums:
            self._sums[what] += steps / record[what]
        if self._before - self._told < self.interval:
            return
        self._told = self._before
        # Steps are of one size, so the mean speed is the harmonic one.
        samples, tflops = (self._steps / total for total in self._sums.values())
        self.console.say(
            f"mean of steps {self._first} to {self._before}: {samples:,.2f} samples/s, "
            f"{tflops:.2f} TFLOPS/device"
        )
