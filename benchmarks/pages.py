"""Tables of figures that benchmarks write into pages of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Put each table between its two comments: `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises ValueError for a table that has no place in the page.
    """
    for name, text in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"the page has no {begin.strip()} ... {end}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(value: float) -> str:
    """Format a time in a suitable unit, with two or three digits."""
    for name, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{_digits(value / size)} {name}"
    return f"{_digits(value)} s" if value >= 0.1 else f"{_digits(1000 * value)} ms"


def size(value: float) -> str:
    """Format a size in a suitable unit."""
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= unit:
            return f"{_digits(value / unit)} {name}"
    return f"{_digits(value / 1e3)} kB"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.3g}"
