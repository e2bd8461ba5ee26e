"""Tables in the docs that heavy tests write: what was run, with its figures."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOT_RUN = "not run"
Key = tuple[str, ...]


@dataclass
class PageTable:
    """A table between two comments of a page; its first columns, the keys, identify a row."""

    marker: str
    keys: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Key]
    cells: dict[Key, dict[str, str]] = field(default_factory=dict)

    def note(self, *key: str, **columns: str) -> None:
        """Record results for a row; underscores in column names become spaces."""
        row = self.cells.setdefault(key, {})
        row.update({name.replace("_", " "): text for name, text in columns.items()})

    def write(self, page: Path) -> None:
        """Write the recorded results into the page; cells that were not run now are kept."""
        begin, end = (f"<!-- {self.marker}: {one} -->" for one in ("begin", "end"))
        with page.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # tests of other rows may run at the same time
            text = file.read()
            assert text.count(begin) == text.count(end) == 1, f"{page} has no place for {begin}"
            head, _, rest = text.partition(begin)
            before, _, tail = rest.partition(end)
            cells = self._read(before)
            for key, columns in self.cells.items():
                cells.setdefault(key, {}).update(columns)
            file.seek(0)
            file.truncate()
            file.write(f"{head}{begin}\n{self._table(cells)}{end}{tail}")

    def _read(self, table: str) -> dict[Key, dict[str, str]]:
        width, found = len(self.keys) + len(self.columns), {}
        for line in table.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            key, values = tuple(cells[: len(self.keys)]), cells[len(self.keys) :]
            if len(cells) == width and key in self.rows:
                found[key] = dict(zip(self.columns, values, strict=True))
        return found

    def _table(self, cells: Mapping[Key, Mapping[str, str]]) -> str:
        head = (*self.keys, *self.columns)
        lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * len(head))}|"]
        for key in self.rows:
            shown = [cells.get(key, {}).get(column, NOT_RUN) for column in self.columns]
            lines.append(f"| {' | '.join((*key, *shown))} |")
        return "\n".join(lines) + "\n"
