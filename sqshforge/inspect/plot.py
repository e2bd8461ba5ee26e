"""A picture of where a squash file's bytes are."""

from __future__ import annotations

from pathlib import Path

from sqshforge.errors import MissingError, RequestError, shown
from sqshforge.host.terminal import human
from sqshforge.inspect.inspect import Inspection

BARS = 15  # of each kind
LONG = 48  # letters of a name
KINDS = (".png", ".svg", ".pdf")


def draw(found: Inspection, picture: Path) -> None:
    """Draw the largest parts and the largest Python packages, as stored.

    Raises `MissingError` without matplotlib, `RequestError` for another kind of picture
    and for a place that cannot be written to.
    """
    if picture.suffix.lower() not in KINDS:
        raise RequestError(
            f"{picture.name} is no kind of picture that we draw",
            where="--plot",
            mend=f"end its name with {', '.join(KINDS)}",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError(
            "matplotlib is not installed (it draws)", mend="pip install 'sqshforge[plot]'"
        ) from None
    parts = [(f"/{shown(path)}", share.stored) for path, share in found.parts.items()][:BARS]
    packages = [(shown(f"{one.name} {one.version}"), one.share.stored) for one in found.python][
        :BARS
    ]
    figure = Figure(figsize=(14, 6), layout="constrained")
    figure.suptitle(f"{found.file.name}: {human(found.size)}, {human(found.unpacked)} unpacked")
    for axes, title, bars in zip(
        figure.subplots(1, 2), ("parts", "Python packages"), (parts, packages), strict=True
    ):
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
            mend="name another place with --plot",
        ) from None


def _label(size: int, whole: int) -> str:
    return f"{human(size)}, {100 * size / max(1, whole):.0f}%"


def _short(name: str) -> str:
    """The end of a long path says more than its start."""
    return name if len(name) <= LONG else f"...{name[3 - LONG :]}"
