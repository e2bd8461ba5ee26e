"""Draw the pictures, one for each quantity, with the curves of all runs together."""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.errors import RequestError
from training.report.history import Run, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLOCKS = 400  # points of a curve, at most
SPANS = 8  # spans of the moving average in a run
LONG = 60  # characters of a name, at most
LOST = "the first loss that is not a number"
PALE, BAND = 0.4, 0.25  # opacities


@dataclass(frozen=True)
class Picture:
    """A quantity to draw: its column, and the label of its axis.

    second: another column, which is drawn dashed. points, second_points: what a point is.
    least_top: the least upper end of the axis, so that tiny values look tiny.
    """

    file: str
    column: str
    title: str
    unit: str
    scale: float = 1.0
    of: str = "reports"
    points: str = "mean since the report before"
    second: str = ""
    second_points: str = ""
    is_noisy: bool = False
    may_be_log: bool = False
    from_zero: bool = True
    least_top: float = 0.0

    def tables(self, run: Run) -> dict[str, Table]:
        """Return the tables that have a curve each, by what distinguishes them."""
        if self.of == "evaluations":
            return run.evaluations
        return {"": {"steps": run.steps, "reports": run.reports, "saves": run.saves}[self.of]}


_STEP: dict[str, Any] = {"of": "steps", "points": "each step"}
_NOISY: dict[str, Any] = {**_STEP, "is_noisy": True, "may_be_log": True, "from_zero": False}
PICTURES = (
    Picture("loss.png", "loss", "training loss", "nats a token", **_NOISY),
    Picture(
        "evaluation-loss.png",
        "loss",
        "evaluation loss",
        "nats a token",
        of="evaluations",
        points="each evaluation",
        from_zero=False,
    ),
    Picture("gradient-norm.png", "grad_norm", "gradient norm", "global L2 norm", **_NOISY),
    Picture("learning-rate.png", "learning_rate", "learning rate", "learning rate", **_STEP),
    Picture("step-time.png", "seconds_per_step", "time of a step", "seconds"),
    Picture(
        "throughput.png", "tokens_per_second_per_device", "throughput", "tokens a second and device"
    ),
    Picture("mfu.png", "mfu", "model FLOPs utilization (MFU)", "% of the device's peak", 100.0),
    Picture(
        "data-wait.png",
        "data_wait",
        "waiting for data",
        "% of the time, slowest rank",
        100.0,
        least_top=1.0,
    ),
    Picture(
        "saves.png",
        "seconds",
        "time of a save",
        "seconds",
        of="saves",
        points="until the checkpoint is complete",
        second="waited",
        second_points="of which training waited",
    ),
    Picture(
        "memory.png",
        "memory_bytes",
        "peak memory of a device",
        "GiB",
        2**-30,
        points="largest so far",
    ),
)


@dataclass(frozen=True)
class Axis:
    """What curves are drawn over: a column of every table, and its units by their size."""

    column: str
    title: str
    units: tuple[tuple[float, str], ...]

    def unit(self, runs: Sequence[Run]) -> tuple[float, str]:
        """Choose the largest unit that fits into the longest run; return its size and label."""
        far = max((max(run.steps.finite(self.column), default=0.0) for run in runs), default=0.0)
        return next((one for one in reversed(self.units) if one[0] <= far), self.units[0])


OVER = {
    "steps": Axis("step", "steps", ((1.0, "step"),)),
    "tokens": Axis(
        "tokens_seen",
        "tokens",
        (
            (1.0, "tokens seen"),
            (1e6, "tokens seen, millions"),
            (1e9, "tokens seen, billions"),
        ),
    ),
    "time": Axis(
        "training_seconds",
        "training time",
        (
            (1.0, "training time, seconds"),
            (60.0, "training time, minutes"),
            (3600.0, "training time, hours"),
        ),
    ),
}


@dataclass(frozen=True)
class Curve:
    """A table of a run to draw; `name` is empty if there is nothing to distinguish it from."""

    run: Run
    table: Table
    name: str
    colour: str


def draw_pictures(runs: list[Run], over: str) -> dict[str, bytes]:
    """Draw every quantity that any run has; return {file name: PNG}.

    Raises RequestError without matplotlib, and if no run has recorded what `over` asks for.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(
            "the pictures are drawn by the library matplotlib, which is not installed; "
            "fix: pip install matplotlib"
        ) from error
    axis = OVER[over]
    if not any(run.steps.has(axis.column) for run in runs):
        raise RequestError(
            f"--over={over}: no run has recorded how long its steps take, which its reports do; "
            "fix: give --over=steps"
        )
    drawn = {}
    for picture in PICTURES:
        if curves := _curves(picture, runs, axis):
            figure = Figure(figsize=(9, 4.6), layout="constrained")
            _draw(figure, picture, curves, runs, axis)
            into = io.BytesIO()
            figure.savefig(into, format="png", dpi=100)
            drawn[picture.file] = into.getvalue()
    return drawn


def blocks(
    xs: Sequence[float], ys: Sequence[float], most: int = BLOCKS
) -> list[tuple[float, float, float, float]]:
    """Thin a curve: return (middle, mean, least, largest) of at most `most` blocks of points.

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


def decay(points: int) -> float:
    """Choose the moving average's constant for a curve of that many points; 0 for none.

    It is the constant of a span of an eighth of them, 1 - 2 / (span + 1): 0.667 for 40 points.
    """
    return max(0.0, 1 - 2 / (points // SPANS + 1))


def moving_average(ys: Sequence[float], constant: float) -> list[float]:
    """Average with weights that fall exponentially to both sides: constant ** distance.

    Both sides are used because an average of only earlier values lags behind a falling loss. At the
    beginning, where the loss is steep, a value is averaged only as far ahead as there are values
    behind it. The weights in use are scaled to sum to 1 (the correction for bias). Values that are
    not finite do not count, and have NaN in their places.
    """
    averages = []
    for place, y in enumerate(ys):
        total = weights = 0.0
        for other, value in enumerate(ys[: 2 * place + 1]):
            if math.isfinite(value):
                weight = constant ** abs(place - other)
                total, weights = total + weight * value, weights + weight
        averages.append(total / weights if math.isfinite(y) else math.nan)
    return averages


def smoothing(picture: Picture, points: int) -> str:
    """Describe how a curve of that many points is smoothed; empty if it is drawn as it is."""
    if points > BLOCKS:
        return f"means of {math.ceil(points / BLOCKS)} points, band: least to largest"
    constant = decay(points) if picture.is_noisy else 0.0
    return f"EMA, \N{GREEK SMALL LETTER BETA} = {constant:.3g}" if constant else ""


def _curves(picture: Picture, runs: list[Run], axis: Axis) -> list[Curve]:
    """Find the curves that can be drawn; the others use up colors, so that a run keeps its own.

    If runs have several curves each, every curve has a color of its own.
    """
    found = [(run, *each) for run in runs for each in picture.tables(run).items()]
    return [
        Curve(
            run,
            table,
            ": ".join(filter(None, (run.name if len(runs) > 1 else "", label))),
            _colour(place),
        )
        for place, (run, label, table) in enumerate(found)
        if table.has(axis.column, picture.column)
    ]


def _draw(
    figure: Figure, picture: Picture, curves: list[Curve], runs: list[Run], axis: Axis
) -> None:
    """Draw a picture's axes, its curves, and its legend."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = figure.subplots()
    worth, label = axis.unit(runs)
    entries: list[tuple[Any, str]] = []
    for curve in curves:
        entries += _curve(axes, picture, curve, axis.column, worth)
    if len(runs) > 1:
        entries += _styles(picture, curves)
    numbers = FuncFormatter(lambda value, _: f"{value:,.10g}")
    if picture.may_be_log and _spread(picture, curves) > 100:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(numbers)
    if picture.from_zero:
        axes.set_ylim(0, max(1.08 * _largest(picture, curves), picture.least_top) or 1)
    # All pictures of a page have the same range.
    axes.set_xlim(0, max(max(run.steps.finite(axis.column), default=0) for run in runs) / worth)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=axis.column == "step"))
    axes.xaxis.set_major_formatter(numbers)
    axes.set_title(
        f"{picture.title[0].upper()}{picture.title[1:]} over {axis.title}",
        loc="left",
        fontweight="bold",
    )
    axes.set_xlabel(label)
    axes.set_ylabel(picture.unit)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, entries)


def _curve(
    axes: Axes, picture: Picture, curve: Curve, column: str, worth: float
) -> list[tuple[Any, str]]:
    """Draw one curve; return its entries in the legend, without styles if it has a name.

    Many points are drawn as the means of blocks, in a pale band of their ranges; few points that
    are noisy, as their moving average over the pale points themselves.
    """
    run, table, colour = curve.run, curve.table, curve.colour
    xs = [x / worth for x in table.columns[column]]
    ys = [y * picture.scale for y in table.columns[picture.column]]
    thin = blocks(xs, ys)
    x, mean, least, largest = zip(*thin, strict=True)
    how = smoothing(picture, len(xs))
    # A few points alone would be hard to see, and a single one would not be a line at all.
    style: dict[str, Any] = {
        "color": colour,
        "marker": "o" if len(thin) < 25 else None,
        "markersize": 3.5,
        "clip_on": False,
    }
    styled: list[tuple[Any, str]] = []
    if how and len(xs) <= BLOCKS:
        (pale,) = axes.plot(x, mean, **style, alpha=PALE, linewidth=1.2)
        averages = moving_average(mean, decay(len(xs)))
        (line,) = axes.plot(x, averages, color=colour, linewidth=2.4, zorder=3)
        styled.append((pale, picture.points))
    else:
        (line,) = axes.plot(x, mean, **style, linewidth=1.6, zorder=3)
        if how:
            axes.fill_between(x, least, largest, color=colour, alpha=BAND, linewidth=0)
    if picture.second:
        second = [y * picture.scale for y in table.columns[picture.second]]
        waited = [part[1] for part in blocks(xs, second)]
        (dashed,) = axes.plot(x, waited, **style, linestyle="--", linewidth=1.4, zorder=3)
        styled.append((dashed, picture.second_points))
    if picture.column == "loss" and table is run.steps and run.lost:
        at = table.columns["step"].index(run.lost[0])
        gone = axes.axvline(xs[at], color=colour, linestyle=":")
        styled.append((gone, LOST))
    if curve.name:
        return [(line, _short(curve.name) + (f" ({how})" if how else ""))]
    return [(line, how or picture.points), *styled]


def _styles(picture: Picture, curves: list[Curve]) -> list[tuple[Any, str]]:
    """Return the legend's entries for pale, dashed and dotted lines, for several runs together."""
    from matplotlib.lines import Line2D

    lengths = [len(curve.table) for curve in curves]
    short = [count for count in lengths if count <= BLOCKS and smoothing(picture, count)]
    shown = {
        picture.points: {"alpha": PALE} if short else None,
        picture.second_points: {"linestyle": "--"} if picture.second else None,
        LOST: {"linestyle": ":"}
        if picture.of == "steps"
        and picture.column == "loss"
        and any(curve.run.lost for curve in curves)
        else None,
    }
    return [
        (Line2D([], [], color="black", **style), text)
        for text, style in shown.items()
        if style is not None
    ]


def _legend(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Put the legend below the curves, where it covers nothing."""
    widest = max(len(text) for _, text in entries)
    columns = max(1, min(len(entries), 110 // (widest + 6)))
    rows = math.ceil(len(entries) / columns)
    figure.set_figheight(4.6 + 0.22 * rows)
    legend = figure.legend(
        [line for line, _ in entries],
        # A name that begins with an underscore would be left out, one with dollars be a formula.
        [f" {text}" for _, text in entries],
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _short(name: str) -> str:
    return name if len(name) <= LONG else f"...{name[-LONG:]}"


def _largest(picture: Picture, curves: list[Curve]) -> float:
    columns = [picture.column, picture.second] if picture.second else [picture.column]
    seen = [value for curve in curves for one in columns for value in curve.table.finite(one)]
    return max(seen, default=0.0) * picture.scale


def _spread(picture: Picture, curves: list[Curve]) -> float:
    """Return the largest value over the least; 0 unless all are above 0."""
    seen = [value for curve in curves for value in curve.table.finite(picture.column)]
    return max(seen) / min(seen) if min(seen) > 0 else 0.0


def _colour(place: int) -> str:
    """Return a color of the usual cycle of ten, and then others, each a golden angle further."""
    if place < 10:
        return f"C{place}"
    red, green, blue = colorsys.hsv_to_rgb(place * 0.618 % 1, 0.75, 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
