"""Draw what takes the space in a squash file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqshforge.errors import MissingError, RequestError, shown
from sqshforge.host.terminal import human
from sqshforge.inspect.inspect import Inspection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = 15  # most bars of each kind
LONG = 48  # most characters of a name
KINDS = (".png", ".svg", ".pdf")


def draw(found: Inspection, picture: Path) -> None:
    """Draw the largest parts and Python packages by stored size, and where the hot files are.

    Raises `MissingError` without matplotlib, `RequestError` for an unsupported picture format
    or a file that cannot be written.
    """
    if picture.suffix.lower() not in KINDS:
        raise RequestError(
            f"{picture.name} has an unsupported picture format",
            where="--plot",
            fix=f"end its name with {', '.join(KINDS)}",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError(
            "matplotlib is not installed (it draws)", fix="pip install 'sqshforge[plot]'"
        ) from None
    parts = [(f"/{shown(path)}", share.stored) for path, share in found.parts.items()][:BARS]
    packages = [(shown(f"{one.name} {one.version}"), one.share.stored) for one in found.python][
        :BARS
    ]
    figure = Figure(figsize=(14, 6), layout="constrained")
    figure.suptitle(f"{found.file.name}: {human(found.size)}, {human(found.unpacked)} unpacked")
    drawings = figure.subplot_mosaic(
        [["file", "file"], ["parts", "Python packages"]], height_ratios=[1, 12]
    )
    _draw_file(drawings["file"], found)
    for title, bars in (("parts", parts), ("Python packages", packages)):
        axes = drawings[title]
        names = [_short(name) for name, _ in bars]
        drawn = axes.barh(range(len(bars)), [size / 1e6 for _, size in bars], color="#2a6f97")
        axes.bar_label(drawn, [_label(size, found.stored) for _, size in bars], padding=3)
        axes.set_yticks(range(len(bars)), names, parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.35)
        axes.set_title(title)
        axes.set_xlabel("MB in the squash file")
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        raise RequestError(
            f"the picture cannot be written: {error.strerror}",
            where=str(picture),
            fix="name another file with --plot",
        ) from None


def _draw_file(axes: Axes, found: Inspection) -> None:
    """Draw the file as one bar, from its first byte to its last."""
    hot_end = found.hot.offset + found.hot.length if found.hot is not None else 0
    pieces = (
        ("read by a start", 0, hot_end, "#c8553d"),
        ("other files", hot_end, found.content_end, "#2a6f97"),
        ("tables", found.content_end, found.size, "#8d99ae"),
    )
    for name, start, end, colour in pieces:
        if end > start:
            label = f"{name}, {human(end - start)}"
            axes.barh(0, (end - start) / 1e6, left=start / 1e6, color=colour, label=label)
    axes.set_xlim(0, max(1, found.size) / 1e6)
    axes.set_yticks([])
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(pieces), frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label(size: int, whole: int) -> str:
    return f"{human(size)}, {100 * size / max(1, whole):.0f}%"


def _short(name: str) -> str:
    """Cut off the start of a long name, whose end says more."""
    return name if len(name) <= LONG else f"...{name[3 - LONG :]}"
