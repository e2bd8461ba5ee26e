"""Read one column of JSON files, whatever other columns each file has.

The library datasets expects all files to have the columns of the first one: it would refuse a file
with one more, such as notes on where its texts are from.
"""

from __future__ import annotations

from typing import Any


class NoTextError(ValueError):
    """Rows lack the column, having only `columns`, or it holds `kind` instead of text."""

    def __init__(self, column: str, columns: list[str], kind: str = "") -> None:
        self.columns, self.kind = sorted(columns), kind
        super().__init__(
            f"{kind}, not text, in column {column!r}"
            if kind
            else f"no column {column!r}; there are: {', '.join(self.columns) or 'none'}"
        )


def read_column_alone() -> None:
    """Make the library datasets read only the requested column of JSON files.

    Columns are requested by `features`, which then need not name all of a file's. Rows that have no
    text there raise NoTextError when they are read.
    """
    from datasets.packaged_modules.json.json import Json

    if Json._cast_table is not _cast_table:
        _library.append(Json._cast_table)
        Json._cast_table = _cast_table


_library: list[Any] = []
"""The library's own function, once ours has replaced it."""


def _cast_table(builder: Any, table: Any, *args: Any, **more: Any) -> Any:
    """Drop the columns that were not requested before the library checks a table's columns.

    Of a column that holds values of several kinds the library makes strings, each value in JSON's
    notation, so that texts would be in quotes and have escapes for their line ends.
    """
    import pyarrow as pa

    if wanted := builder.config.features:
        for column in wanted:
            if column not in table.column_names:
                raise NoTextError(column, table.column_names)
            if [column] in more.get("json_field_paths", ()):
                raise NoTextError(column, table.column_names, "text and other values")
            kind = table.schema.field(column).type
            if kind not in (pa.string(), pa.large_string(), pa.null()):
                raise NoTextError(column, table.column_names, str(kind))
        table = table.select(list(wanted))
    return _library[0](builder, table, *args, **more)
