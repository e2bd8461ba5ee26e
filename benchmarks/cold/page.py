"""The tables and the picture of docs/background/cold-start.md, by benchmarks/results/start.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import pages
from benchmarks.pages import seconds, size, table
from benchmarks.scale import facts, staging, study

Row = Mapping[str, Any]
Key = tuple[str, int, str, str]  # target, zstd's level, block, order

NODES = 1000
PICTURE = "cold-start.png"
ORDERS = {
    "walk": "folder order",
    "hot": "hot files first",
    "warm": "hot files first, read ahead",
}
# At most so much of what folder order takes: in a row, in the table.
GOALS = {"bytes": ("bytes", 0.5), "requests": ("requests", 0.6), "file_bytes": ("size", 1.01)}
# Of a start that reads ahead, at a latency: at most so much of the two things that it does, one
# after the other, and of a start in folder order.
WARM_LATENCY = 1  # milliseconds
WARM_GOALS = {"range and start": 1.2, "folder order": 0.5}
BLOCK = "1M"  # the profile's
UNMEASURED = ""
NONE: Mapping[str, Any] = {"rows": []}  # a result that is not there yet
MISSING = "Not measured yet; `.venv/bin/python -m benchmarks.start` fills this in."


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Put the result into the page at a path, and draw its picture beside it."""
    path.write_text(pages.fill(path.read_text(), tables(result)))
    draw(result, path.with_name(PICTURE))


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables, by their names."""
    return {
        "reads": reads(result),
        "goals": goals(result),
        "seconds": times(result),
        "reading ahead": reading_ahead(result),
        "nodes": nodes(result),
    }


def reads(result: Mapping[str, Any]) -> str:
    """Bytes and requests of a start without a latency, a column for each reader."""
    rows = _cold(result)
    if not rows:
        return MISSING
    readers = _readers(rows)
    found = {(_key(row), row["reader"]): row for row in rows}
    lines = []
    for key in _keys(rows):
        cells = [found.get((key, reader)) for reader in readers]
        whole = next(cell["file_bytes"] for cell in cells if cell)
        lines.append([*_named(key), size(whole), *map(_read, cells)])
    picture = f"![Bytes, requests and seconds of a cold start]({PICTURE})"
    return f"{table(['image', 'packed', 'order', 'file', *readers], lines)}\n\n{picture}"


def goals(result: Mapping[str, Any]) -> str:
    """What hot files first take of what folder order takes, and whether that is the goal."""
    found = {(_key(row), row["reader"]): row for row in _cold(result)}
    lines = []
    for (key, reader), row in sorted(found.items(), key=lambda one: (_rank(one[0][0]), one[0][1])):
        before = found.get(((*key[:-1], "walk"), reader))
        if key[-1] == "hot" and before is not None:
            cells = [_goal(row[name] / before[name], most) for name, (_, most) in GOALS.items()]
            lines.append([key[0], _packing(key), reader, *cells])
    if not lines:
        return MISSING
    heads = (f"{label} (goal: {most})" for label, most in GOALS.values())
    return table(["image", "packed", "reader", *heads], lines)


def reading_ahead(result: Mapping[str, Any]) -> str:
    """What a start that reads ahead takes of what its goals compare it with.

    Of files that are packed as the profile says.
    """
    of_block = [row for row in result["rows"] if row["block"] == BLOCK]
    of_latency = [row for row in of_block if row["latency_ms"] == WARM_LATENCY]
    timed = {(_key(row), row["reader"]): row for row in of_latency if "seconds" in row}
    lines = []
    for (key, reader), row in sorted(timed.items(), key=lambda one: (_rank(one[0][0]), one[0][1])):
        before = timed.get(((*key[:-1], "walk"), reader))
        if key[-1] != "warm" or before is None or "range_seconds" not in row:
            continue
        parts = [row["range_seconds"], row["memory_seconds"]]
        ratios = zip((sum(parts), before["seconds"]), WARM_GOALS.values(), strict=True)
        cells = [_goal(row["seconds"] / of, most) for of, most in ratios]
        took = map(seconds, (row["seconds"], *parts, before["seconds"]))
        lines.append([key[0], _packing(key), reader, *took, *cells])
    if not lines:
        return MISSING
    head = ["image", "packed", "reader", "read ahead", "the range alone", "all in memory"]
    heads = (f"of {label} (goal: {most})" for label, most in WARM_GOALS.items())
    return table([*head, ORDERS["walk"], *heads], lines)


def _goal(ratio: float, most: float) -> str:
    return f"{ratio:.3f}, {'met' if ratio <= most else 'missed'}"


def times(result: Mapping[str, Any]) -> str:
    """Seconds to the end of the first step, a column for each reader, a number for each latency."""
    rows = [row for row in result["rows"] if "seconds" in row]
    if not rows:
        return f"{MISSING} It takes a quiet machine."
    latencies = sorted({row["latency_ms"] for row in rows})
    readers = _readers(rows)
    found = {(_key(row), row["reader"], row["latency_ms"]): row["seconds"] for row in rows}
    lines = []
    for key in _keys(rows):
        cells = [[found.get((key, reader, one)) for one in latencies] for reader in readers]
        took = (", ".join("-" if one is None else f"{one:.1f}" for one in cell) for cell in cells)
        lines.append([*_named(key), *took])
    heads = (f"{reader}: {', '.join(map(str, latencies))} ms" for reader in readers)
    return table(["image", "packed", "order", *heads], lines)


def nodes(result: Mapping[str, Any]) -> str:
    """What `NODES` nodes ask of the file system, by the model of docs/background/scale.md.

    Of files that are packed as the profile says.
    """
    rows = [row for row in _cold(result) if row["block"] == BLOCK]
    if not rows:
        return MISSING
    _, servers = study.image_rates(facts.STRIPES.value)
    lines = []
    for row in sorted(rows, key=lambda row: (row["reader"], _rank(_key(row)))):
        rate = node_rate(row["bytes"], row["requests"])
        lines.append(
            [
                row["reader"],
                *_named(_key(row)),
                size(NODES * row["bytes"]),
                f"{NODES * row['requests'] / 1e6:.1f} M",
                f"{size(NODES * rate)}/s",
                seconds(staging.shared_seconds(NODES, row["bytes"], rate, servers)),
                _busiest(result, row),
            ]
        )
    head = ["reader", "image", "packed", "order", "all read", "requests", "asked for", "read after"]
    head.append("busiest second")
    if all(line[-1] == UNMEASURED for line in lines):
        head, lines = head[:-1], [line[:-1] for line in lines]
    return table(head, lines)


def node_rate(read: int, requests: int) -> float:
    """Bytes/s of a node that waits for each request before it sends the next one."""
    flow = facts.CLIENT_SERVER.value
    if not requests:
        return flow
    return staging.mounted_rate(read / requests, facts.MOUNT_WAIT.value, flow)


def _busiest(result: Mapping[str, Any], row: Row) -> str:
    """Bytes that all nodes ask for in the busiest second, as measured at the model's latency."""
    latency = round(1000 * facts.MOUNT_WAIT.value)
    for one in result["rows"]:
        if (_key(one), one["reader"], one["latency_ms"]) == (_key(row), row["reader"], latency):
            found = one.get("busiest_bytes")
            return f"{size(NODES * found)}/s" if found is not None else UNMEASURED
    return UNMEASURED


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw bytes and requests by block and order, and seconds by latency where they are there."""
    counted = _cold(result)
    if not counted:
        return
    timed = [row for row in result["rows"] if "seconds" in row]
    figure = Figure(figsize=(13 if timed else 8.5, 4), layout="constrained")
    sheets = figure.subplots(1, 3 if timed else 2)
    reader = _readers(counted)[0]
    rows = [row for row in counted if row["reader"] == reader]
    _bars(sheets[0], rows, [row["bytes"] / 1e6 for row in rows], "MB read", reader)
    _bars(sheets[1], rows, [float(row["requests"]) for row in rows], "requests", reader)
    if timed:
        of_reader = [row for row in timed if row["reader"] == reader]
        _lines(sheets[2], [row for row in of_reader if row["block"] == BLOCK] or of_reader, reader)
    for axes in sheets:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = sheets[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize="small")
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float], unit: str, reader: str) -> None:
    places = list(dict.fromkeys(_place(key) for key in _keys(rows)))
    orders = [one for one in ORDERS if any(row["order"] == one for row in rows)]
    for number, order in enumerate(orders):
        of_order = [
            (places.index(_place(_key(row))) + 0.27 * (number - 1), value)
            for row, value in zip(rows, values, strict=True)
            if row["order"] == order
        ]
        at, heights = zip(*of_order, strict=True)
        axes.bar(at, heights, width=0.25, label=ORDERS[order])
    axes.set_xticks(range(len(places)), places, fontsize="small")
    axes.set_ylabel(f"{unit} ({reader})")
    saved = [
        1 - values[one] / values[other]
        for one, row in enumerate(rows)
        for other, before in enumerate(rows)
        if (row["order"], before["order"]) == ("hot", "walk")
        and _place(_key(row)) == _place(_key(before))
    ]
    if saved:
        axes.set_title(f"Hot files first: {_reach(saved)} less ({unit})", fontsize="medium")


def _lines(axes: Axes, rows: Sequence[Row], reader: str) -> None:
    for key in _keys(rows):
        of_key = sorted((row["latency_ms"], row["seconds"]) for row in rows if _key(row) == key)
        latencies, took = zip(*of_key, strict=True)
        axes.plot(latencies, took, "o-", markersize=3, label=", ".join(_named(key)))
    axes.set(xlabel="ms a request", ylabel=f"s to the first step ({reader})", ylim=(0, None))
    axes.legend(fontsize="xx-small")
    found = {(_key(row), row["latency_ms"]): row["seconds"] for row in rows}
    most = max(row["latency_ms"] for row in rows)
    saved = [
        1 - took / found[(*key[:-1], "walk"), most]
        for (key, latency), took in found.items()
        if (key[-1], latency) == ("warm", most) and ((*key[:-1], "walk"), most) in found
    ]
    if saved:
        less = _reach(saved)
        axes.set_title(f"Read ahead at {most} ms: {less} less time", fontsize="medium")


def _reach(shares: Sequence[float]) -> str:
    """The smallest and the largest of some shares, in percent; one where they are alike."""
    ends = dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares)))
    return " to ".join(ends)


def _cold(result: Mapping[str, Any]) -> list[Row]:
    """The rows without a latency."""
    return [row for row in result["rows"] if row["latency_ms"] == 0]


def _key(row: Row) -> Key:
    return row["target"], row["level"], row["block"], row["order"]


def _keys(rows: Iterable[Row]) -> list[Key]:
    return sorted({_key(row) for row in rows}, key=_rank)


def _rank(key: Key) -> tuple[str, int, int, int]:
    target, level, block, order = key
    kilobytes = int(block[:-1]) * {"K": 1, "M": 1024}[block[-1]]
    return target, level, kilobytes, list(ORDERS).index(order)


def _named(key: Key) -> list[str]:
    return [key[0], _packing(key), ORDERS[key[-1]]]


def _place(key: Key) -> str:
    return f"{key[0]}\n{_packing(key)}"


def _packing(key: Key) -> str:
    return f"zstd {key[1]}, {key[2]}"


def _readers(rows: Iterable[Row]) -> list[str]:
    return sorted({row["reader"] for row in rows})


def _read(row: Row | None) -> str:
    return UNMEASURED if row is None else f"{size(row['bytes'])}, {row['requests']:,}"
