"""The tables of docs/background/scale.md and of the pages below it, by the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import seconds, size, table

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "background"
Rows = Sequence[Mapping[str, Any]]


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Put the result's tables into the pages of a folder."""
    for name in PAGES:
        page = folder / name
        page.write_text(fill(name, page.read_text(), result))


def fill(name: str, page: str, result: Mapping[str, Any]) -> str:
    """Put the tables of a page into its text. Raises ValueError for one that has no place there."""
    return pages.fill(page, {of: make(result) for of, make in PAGES[name].items()})


def _image(result: Mapping[str, Any]) -> str:
    rows: Rows = result["image"]
    nodes = list(dict.fromkeys(row["nodes"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    found = {(row["way"], row["nodes"]): row for row in rows}
    last = nodes[-1]
    return table(
        ["way", *(f"{count:,} nodes" for count in nodes), f"read of the file system at {last:,}"],
        [
            [
                way,
                *(
                    f"{seconds(one['formula_s'])} ({seconds(one['simulated_s'])})"
                    for one in (found[way, count] for count in nodes)
                ),
                size(found[way, last]["bytes"]),
            ]
            for way in ways
        ],
    )


def _checkpoint(result: Mapping[str, Any]) -> str:
    return table(
        ["nodes", "files", "a rank's part", "all write", "stall", "written after", "read again"],
        [
            [
                f"{row['nodes']:,}",
                f"{row['files']:,}",
                size(row["rank_bytes"]),
                f"{size(row['bytes_per_s'])}/s",
                seconds(row["stall_s"]),
                seconds(row["writing_s"]),
                seconds(row["loading_s"]),
            ]
            for row in result["checkpoint"]
        ],
    )


def _list(result: Mapping[str, Any]) -> str:
    return table(
        ["ranks that share the state", "entries", "`.metadata`", "rank 0 packs it in"],
        [
            [
                f"{row['files']:,}",
                f"{row['entries']:,}",
                size(row["list_bytes"]),
                seconds(row["list_s"]),
            ]
            for row in result["checkpoint"]
        ],
    )


def _failures(result: Mapping[str, Any]) -> str:
    return table(
        ["nodes", "a failure every", "at the published worst and best"],
        [
            [
                f"{row['nodes']:,}",
                seconds(row["mtbf_s"]),
                f"{seconds(row['mtbf_worst_s'])}, {seconds(row['mtbf_best_s'])}",
            ]
            for row in result["saves"]
            if row["background"]
        ],
    )


def _saves(result: Mapping[str, Any]) -> str:
    return table(
        ["nodes", "save", "stall", "restart", "Young", "Daly", "goodput", "saved every hour"],
        [
            [
                f"{row['nodes']:,}",
                "in the background" if row["background"] else "waiting",
                seconds(row["stall_s"]),
                seconds(row["restart_s"]),
                seconds(row["young_s"]),
                seconds(row["daly_s"]),
                f"{row['goodput']:.1%}",
                f"{row['goodput_hour']:.1%}",
            ]
            for row in result["saves"]
        ],
    )


def _in_place(result: Mapping[str, Any]) -> str:
    rows: Rows = result["in_place"]
    shares = sorted({row["share"] for row in rows})
    found = {(row["nodes"], row["share"]): row for row in rows}
    nodes = list(dict.fromkeys(row["nodes"] for row in rows))
    return table(
        ["nodes", "requeue", "in place", *(f"goodput, {share:.0%} in place" for share in shares)],
        [
            [
                f"{count:,}",
                seconds(found[count, 0.0]["requeue_s"]),
                seconds(found[count, 0.0]["in_place_s"]),
                *(f"{found[count, share]['goodput']:.2%}" for share in shares),
            ]
            for count in nodes
        ],
    )


def _rendezvous(result: Mapping[str, Any]) -> str:
    return table(
        ["nodes", "writes, all at once", "time", "simulated", "simulated, over 30 s", "all read"],
        [
            [
                f"{row['nodes']:,}",
                f"{row['at_once_writes']:,}",
                seconds(row["at_once_s"]),
                _met(row, "at_once_simulated"),
                _met(row, "spread_simulated"),
                f"{size(row['polled_bytes_per_s'])}/s",
            ]
            for row in result["rendezvous"]
        ],
    )


def _met(row: Mapping[str, Any], name: str) -> str:
    """Tell how a simulated meeting ended."""
    if name not in row:
        return ""
    found = row[name]
    if found["joined"] < row["nodes"]:
        return f"**{found['joined']:,} of {row['nodes']:,}** after {seconds(found['seconds'])}"
    return f"all after {seconds(found['seconds'])}, {found['writes']:,} writes"


def _mesh(result: Mapping[str, Any]) -> str:
    return table(
        ["ranks", "requests", "bytes", "time at the store", "sockets a rank"],
        [
            [
                f"{row['ranks']:,}",
                f"{row['mesh_requests']:,}",
                size(row["mesh_bytes"]),
                seconds(row["mesh_s"]),
                f"{row['mesh_sockets']:,}",
            ]
            for row in result["rendezvous"]
        ],
    )


def _data(result: Mapping[str, Any]) -> str:
    return table(
        [
            *("nodes", "70 billion", "128 kB ahead", "opens"),
            *("1 billion", "128 kB ahead", "8 MB ahead", "opens"),
        ],
        [
            [
                f"{row['nodes']:,}",
                f"{size(row['large_all'])}/s",
                f"{size(row['large_all_usual'])}/s",
                f"{row['large_opened']:,.0f}/s",
                f"{size(row['small_all'])}/s",
                f"{size(row['small_all_usual'])}/s",
                f"{size(row['small_all_here'])}/s",
                f"{row['small_opened']:,.0f}/s",
            ]
            for row in result["data"]
        ],
    )


def _ahead(result: Mapping[str, Any]) -> str:
    return table(
        ["samples", "their bytes", "formula", "simulated"],
        [
            [
                f"{row['samples']:,}",
                size(row["bytes"]),
                size(row["formula_bytes"]),
                size(row["simulated_bytes"]),
            ]
            for row in result["ahead"]
        ],
    )


def _facts(result: Mapping[str, Any]) -> str:
    return table(
        ["name", "value", "unit", "source"],
        [
            [f"`{one['name']}`", f"{one['value']:,.4g}", one["unit"], one["source"]]
            for one in result["facts"]
        ],
    )


PAGES: Mapping[str, Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "scale.md": {"image": _image},
    "scale/checkpoints.md": {
        "checkpoint": _checkpoint,
        "list": _list,
        "failures": _failures,
        "saves": _saves,
        "in place": _in_place,
    },
    "scale/meeting.md": {"rendezvous": _rendezvous, "mesh": _mesh},
    "scale/data.md": {"data": _data, "ahead": _ahead},
    "scale/facts.md": {"facts": _facts},
}
