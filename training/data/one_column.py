"""Read one column of JSON or CSV files, whatever other columns each file has.

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
    """Make the library datasets read only the requested column of JSON and CSV files.

    Columns are requested by `features`, which then need not name all of a file's. Rows that have no
    text there raise NoTextError when they are read.
    """
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    for reader, ours in ((Json, _cast_json), (Csv, _cast_csv)):
        if reader._cast_table is not ours:
            _library[reader.__name__] = reader._cast_table
            reader._cast_table = ours


_library: dict[str, Any] = {}
"""The library's own functions by their class, once ours have replaced them."""


def _cast_json(builder: Any, table: Any, *args: Any, **more: Any) -> Any:
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
    return _library["Json"](builder, table, *args, **more)


def _cast_csv(builder: Any, table: Any) -> Any:
    """Drop the columns that were not requested, and make texts of the others.

    Pandas takes the first fields of rows for an index, if they have more fields than the header:
    each text would be that of another column.
    """
    if wanted := builder.config.features:
        if any(name.startswith("__index_level_") for name in table.column_names):
            raise ValueError(
                "its rows have more fields than its header; fix: put each text that has a comma "
                "in quotes, and end no row in a comma"
            )
        for column in wanted:
            if column not in table.column_names:
                raise NoTextError(column, table.column_names)
        # Of a file without rows the column has no type.
        table = table.select(list(wanted)).cast(wanted.arrow_schema)
    return _library["Csv"](builder, table)
