"""Of JSON files one column alone, whatever others each of them has.

The library datasets takes the columns of the first file for those of all: a file with one more, as
of notes on where its texts are from, would be refused.
"""

from __future__ import annotations

from typing import Any


class NoTextError(ValueError):
    """Rows without the column, which have `columns`; or of which it holds `kind`, not text."""

    def __init__(self, column: str, columns: list[str], kind: str = "") -> None:
        self.columns, self.kind = sorted(columns), kind
        super().__init__(
            f"{kind} and not text in column {column!r}"
            if kind
            else f"no column {column!r}; there are: {', '.join(self.columns) or 'none'}"
        )


def read_column_alone() -> None:
    """Have the library datasets read so what is loaded from JSON with the features of one column.

    Rows that have no text there raise NoTextError as they are read.
    """
    from datasets.packaged_modules.json.json import Json

    if Json._cast_table is not _cast_table:
        _library.append(Json._cast_table)
        Json._cast_table = _cast_table


_library: list[Any] = []
"""The library's own function, once ours has taken its place."""


def _cast_table(builder: Any, table: Any, *args: Any, **more: Any) -> Any:
    """Leave out of some rows what was not asked for, before the library looks at their columns."""
    import pyarrow as pa

    if wanted := builder.config.features:
        for column in wanted:
            if column not in table.column_names:
                raise NoTextError(column, table.column_names)
            kind = table.schema.field(column).type
            if kind not in (pa.string(), pa.large_string(), pa.null()):
                raise NoTextError(column, table.column_names, str(kind))
        table = table.select(list(wanted))
    return _library[0](builder, table, *args, **more)
