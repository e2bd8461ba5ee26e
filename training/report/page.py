"""One HTML page about runs, which needs nothing beside it, and its pictures."""

from __future__ import annotations

import base64
import colorsys
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from training.errors import RequestError
from training.report.history import Run, Table, differing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


BLOCKS = 400  # points of a curve, at most
LONG = 60  # letters of a name

HEAD = (
    "run",
    "steps",
    "tokens",
    "last loss",
    "best loss (at step)",
    "last evaluation",
    "median tokens/s a device",
    "peak of memory",
    "versions",
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right;
         vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
""".strip()


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


def draw_pictures(runs: list[Run], over: str) -> dict[str, bytes]:
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


def render_page(runs: list[Run], pictures: dict[str, bytes]) -> str:
    """Write the page: what came out, the curves, and in which settings the runs differ."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>\n{STYLE}\n</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _table(
            HEAD,
            [_row(run) for run in runs],
        ),
        *_notes(runs),
    ]
    for picture in PICTURES:
        if picture.file in pictures:
            image = base64.b64encode(pictures[picture.file]).decode()
            parts.append(
                f'<p><img alt="{escape(picture.title)}" src="data:image/png;base64,{image}"></p>'
            )
    parts += _settings(runs)
    return "\n".join([*parts, "</body></html>", ""])


def _row(run: Run) -> list[str]:
    steps = run.settings.get("run.num_steps")
    losses = run.steps.columns["loss"]
    best = min(zip(losses, run.steps.columns["step"], strict=True), key=_loss, default=None)
    evaluations = run.evaluations.finite("loss")
    speeds = run.reports.finite("tokens_per_second_per_device")
    memory = run.reports.finite("memory_bytes")
    return [
        run.name,
        f"{run.last_step:,}" + (f" of {steps:,}" if isinstance(steps, int) else ""),
        f"{run.tokens:,.0f}" if math.isfinite(run.tokens) else "",
        f"{losses[-1]:.4f}" if losses else "",
        f"{best[0]:.4f} ({best[1]:,.0f})" if best and math.isfinite(best[0]) else "",
        f"{evaluations[-1]:.4f}" if evaluations else "",
        f"{statistics.median(speeds):,.0f}" if speeds else "",
        f"{max(memory) / 2**30:.2f} GiB" if memory else "",
        ", ".join(f"{name} {version}" for name, version in run.versions.items()),
    ]


def _loss(pair: tuple[float, float]) -> float:
    """Sort what is no loss behind all losses."""
    return pair[0] if math.isfinite(pair[0]) else math.inf


def _notes(runs: list[Run]) -> list[str]:
    lines = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return ["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"] if lines else []


def _settings(runs: list[Run]) -> list[str]:
    rows = differing(runs)
    if not rows:
        return ["<p>The runs have the same settings.</p>"] if any(r.settings for r in runs) else []
    told = [[name, *(_value(value) for value in values)] for name, values in rows.items()]
    head = "Settings" if len(runs) == 1 else "Settings in which the runs differ"
    return [f"<h2>{head}</h2>", _table(("setting", *(run.name for run in runs)), told)]


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>'
