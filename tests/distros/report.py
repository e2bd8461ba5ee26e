"""The table in docs/machines.md of what was run on which system, as the tests write it."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass
from pathlib import Path

from tests.distros.systems import SYSTEMS

BEGIN, END = "<!-- test-distros: begin -->", "<!-- test-distros: end -->"
COLUMNS = ("system", "user", "Python", "builder", "make quickstart", "again", "make test's set-up")
RULE = "|".join(["---"] * len(COLUMNS))
NOT_RUN = "not run"


@dataclass(frozen=True)
class Results:
    """Cells of the table: (system's name, user) -> column -> text."""

    cells: dict[tuple[str, str], dict[str, str]]

    def note(self, system: str, user: str, **columns: str) -> None:
        row = self.cells.setdefault((system, user), {})
        row.update({name.replace("_", " "): text for name, text in columns.items()})


def write(results: Results, page: Path) -> None:
    """Put results into the page's table; what was not run now keeps what it had."""
    with page.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests of other systems may run beside
        head, _, rest = file.read().partition(BEGIN)
        before, _, tail = rest.partition(END)
        cells = _read(before)
        for key, columns in results.cells.items():
            cells.setdefault(key, {}).update(columns)
        file.seek(0)
        file.truncate()
        file.write(f"{head}{BEGIN}\n{_table(cells)}{END}{tail}")


def _read(table: str) -> dict[tuple[str, str], dict[str, str]]:
    names = {one.title: one.name for one in SYSTEMS.values()}
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(COLUMNS) and cells[0] in names:
            found[names[cells[0]], cells[1]] = dict(zip(COLUMNS[2:], cells[2:], strict=True))
    return found


def _table(cells: dict[tuple[str, str], dict[str, str]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{RULE}|"]
    for name, system in SYSTEMS.items():
        for user in ("root", "user"):
            row = cells.get((name, user), {})
            shown = [row.get(column, NOT_RUN) for column in COLUMNS[2:]]
            lines.append(f"| {' | '.join((system.title, user, *shown))} |")
    return "\n".join(lines) + "\n"
