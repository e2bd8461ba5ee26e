"""What node 0 prints: a line a check, and what is wrong with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from training.job.preflight.finding import Fault, Report
from training.job.preflight.names import Names

ORDER = (
    "node",
    "driver",
    "devices",
    "efa",
    "folder",
    "space",
    "clock",
    "versions",
    "inside",
    "across",
)


@dataclass(frozen=True)
class Row:
    """A check over all nodes."""

    check: str
    seconds: float  # of the slowest node
    told: str


def rows(reports: Sequence[Report]) -> list[Row]:
    """What most nodes told of their own checks."""
    found = []
    for name in ORDER:
        own = [one for report in reports for one in report.findings if one.check == name]
        if own:
            told, _ = Counter(one.told for one in own).most_common(1)[0]
            found.append(Row(name, max(one.seconds for one in own), told))
    return found


def table(nodes: int, seconds: float, lines: Iterable[Row], faults: Sequence[Fault]) -> str:
    """Tell every check, in the order of ORDER."""
    bad = {fault.check for fault in faults}
    ordered = sorted(lines, key=lambda row: ORDER.index(row.check))
    found = []
    for row in ordered:
        word = "BAD" if row.check in bad else "ok"
        found.append(f"  {row.check:8}  {word:3}  {row.seconds:5.1f} s  {row.told}".rstrip())
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    return "\n".join([f"training.preflight: {count}, {seconds:.1f} s", *found])


def wrong(faults: Iterable[Fault], names: Names) -> list[str]:
    """A line a fault, by node."""
    ordered = sorted(faults, key=lambda one: (one.rank is None, one.rank or 0))
    return [f"{_whose(fault, names)}{fault.check}: {fault.text}" for fault in ordered]


def _whose(fault: Fault, names: Names) -> str:
    return "" if fault.rank is None else f"{names[fault.rank]}: "
