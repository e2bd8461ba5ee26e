"""Curves of runs, a PNG for each quantity."""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.errors import RequestError
from training.report.history import Run, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

BLOCKS = 400  # points of a curve, at most
LONG = 60  # letters of a name


@dataclass(frozen=True)
class Picture:
    """A quantity that is drawn: its column, and what its axis says."""

    file: str
    column: str
    title: str
    scale: float = 1.0
    of: str = "steps"
    may_be_log: bool = False
    from_zero: bool = False

    def table(self, run: Run) -> Table:
        tables = {"steps": run.steps, "reports": run.reports, "evaluations": run.evaluations}
        return tables[self.of]


PICTURES = (
    Picture("loss.png", "loss", "loss", may_be_log=True),
    Picture("evaluation-loss.png", "loss", "loss of evaluations", of="evaluations"),
    Picture("gradient-norm.png", "grad_norm", "gradient norm", may_be_log=True),
    Picture("learning-rate.png", "learning_rate", "learning rate", from_zero=True),
    Picture(
        "throughput.png",
        "tokens_per_second_per_device",
        "tokens/s a device",
        of="reports",
        from_zero=True,
    ),
    Picture("mfu.png", "mfu", "share of the peak operations (MFU)", of="reports", from_zero=True),
    Picture(
        "memory.png",
        "memory_bytes",
        "memory at the peak, GiB",
        2**-30,
        of="reports",
        from_zero=True,
    ),
)
OVER = {"steps": ("step", "step"), "tokens": ("tokens_seen", "tokens seen")}
"""What the curves may go over: a column, and what the axis says."""


def draw(runs: list[Run], over: str) -> dict[str, bytes]:
    """Draw every quantity that any run tells; {file name: PNG}.

    Raises RequestError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(
            "the pictures are drawn by the library matplotlib, which is not installed "
            "(pip install matplotlib)"
        ) from error
    drawn = {}
    for picture in PICTURES:
        if not any(picture.table(run).finite(picture.column) for run in runs):
            continue
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        lines = [_curve(axes, picture, run, over, _colour(i)) for i, run in enumerate(runs)]
        if picture.may_be_log and _spread(picture, runs) > 100:
            axes.set_yscale("log")
        if picture.from_zero:
            axes.set_ylim(bottom=0)
        axes.set_title(picture.title)
        axes.set_xlabel(OVER[over][1])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(runs) > 1:
            _legend(axes, lines, runs)
        into = io.BytesIO()
        figure.savefig(into, format="png", dpi=100)
        drawn[picture.file] = into.getvalue()
    return drawn


def blocks(
    xs: Sequence[float], ys: Sequence[float], most: int = BLOCKS
) -> list[tuple[float, float, float, float]]:
    """Thin a curve: (middle, mean, least, largest) of at most `most` blocks of points.

    Points that are not finite are left out; a block without others has NaN.
    """
    size = max(1, math.ceil(len(xs) / most))
    thin = []
    for begin in range(0, len(xs), size):
        part = [y for y in ys[begin : begin + size] if math.isfinite(y)]
        middle = (xs[begin] + xs[min(begin + size, len(xs)) - 1]) / 2
        if part:
            thin.append((middle, math.fsum(part) / len(part), min(part), max(part)))
        else:
            thin.append((middle, math.nan, math.nan, math.nan))
    return thin


def _curve(axes: Axes, picture: Picture, run: Run, over: str, colour: str) -> Line2D:
    """Draw the means of blocks, and their ranges in a pale band; the line of the means."""
    table = picture.table(run)
    xs = table.columns[OVER[over][0]]
    ys = [y * picture.scale for y in table.columns[picture.column]]
    thin = blocks(xs, ys)
    x, mean, least, largest = zip(*thin, strict=True) if thin else ((),) * 4
    # A few points alone would be hard to see, and a single one would not be a line at all.
    marker = "o" if len(thin) < 25 else None
    (line,) = axes.plot(x, mean, color=colour, marker=marker, markersize=3, linewidth=1.4)
    if len(thin) < len(xs):
        axes.fill_between(x, least, largest, color=colour, alpha=0.2, linewidth=0)
    if picture.column == "loss" and table is run.steps and run.lost:
        at = table.columns["step"].index(run.lost[0])
        axes.axvline(xs[at], color=colour, linestyle=":")
    return line


def _spread(picture: Picture, runs: list[Run]) -> float:
    """Give the largest value over the least; 0 where they are not all above 0."""
    seen = [value for run in runs for value in picture.table(run).finite(picture.column)]
    return max(seen) / min(seen) if min(seen) > 0 else 0.0


def _colour(place: int) -> str:
    """Give the colours of the usual cycle of ten, and then others, a golden angle further each."""
    if place < 10:
        return f"C{place}"
    red, green, blue = colorsys.hsv_to_rgb(place * 0.618 % 1, 0.75, 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _legend(axes: Axes, lines: list[Line2D], runs: list[Run]) -> None:
    # A name that begins with an underscore would be left out, one with dollars be a formula.
    names = [f" {run.name}" if len(run.name) <= LONG else f"...{run.name[-LONG:]}" for run in runs]
    legend = axes.legend(lines, names, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
