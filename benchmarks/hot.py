"""Count what packing hot files first saves, from one traced start and a file with and without it.

usage: python -m benchmarks.hot [--image ADDRESS] [--small] [--output DIR]

One image is packed without a list of hot files and with cpu-mamba's (recipes/hot), and one start of
it is traced: the first steps of training. No wall-clock time is measured, so any machine will do.
For each file:

size          bytes of the file
read          bytes that the kernel's squashfs requests from the file, without its tables and
              read-ahead: the kernel keeps what it has unpacked of a file, but only three of the
              blocks that the tails of many files share, so it reads such a block again for files
              that are far apart
distinct      the same, each block once: what a server sends if its client keeps all of it
requests      how often the next new block, in the order of the start, does not follow the one
              before it: requests to a disk that reads ahead sequentially
pack          CPU seconds of packing it, the median of three alternating packs

The last row is a warm start: the hot range that the file records is read in one piece, which is one
request, and only what lies outside of it is requested from the file.

Goals for hot files first: at most 0.5 of the bytes, 0.6 of the requests, 1.01 of the size, and 1.03
of the CPU seconds. ADDRESS defaults to the image that build/cpu-mamba.sqsh was packed from. Writes
hot.json to benchmarks/results/ and exits 1 if a goal is missed. Needs root or user namespaces, and
squashfuse.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import options, report
from benchmarks.options import ROOT
from sqshforge.errors import MissingError
from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, human, show_table
from sqshforge.hot import NONE, HotList
from sqshforge.image import address
from sqshforge.image.enroot import ImageConfig
from sqshforge.run import trace
from sqshforge.run.trace import Trace
from sqshforge.squash import pack as squash
from sqshforge.squash import request
from sqshforge.squashfs import superblock
from sqshforge.squashfs.content import LENGTH, blocks, fragment
from sqshforge.squashfs.hot_note import HotRange, noted
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.inode import FILE
from tests.support import tiny_root

COLUMNS: dict[str, Callable[[float], str]] = {
    **dict.fromkeys(("size", "read", "distinct"), human),
    "requests": "{:.0f}".format,
    "pack": "{:.1f} s".format,
}
GOALS = {"read": 0.5, "requests": 0.6, "size": 1.01, "pack": 1.03}
PACKS = 3
SHARED = 3  # the default of CONFIG_SQUASHFS_FRAGMENT_CACHE_SIZE
FILES = 400  # of the small run's image, a tenth of which are read
COMMAND = ("sh", "-c", "cat /usr/data/*5 > /dev/null")


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--image", metavar="ADDRESS")
    given = options.parse(parser)
    with tempfile.TemporaryDirectory(prefix="sqshforge-hot-") as folder:
        place = Path(folder)
        image = small_image(place) if given.small else given.image or packed_from()
        result = measure(image, place, COMMAND if given.small else None)
    show(result)
    met = all(one["met"] for one in result["goals"].values())
    return options.finish(given, "hot", result, met=met)


def packed_from() -> str:
    """Return the address of the image that build/cpu-mamba.sqsh was packed from."""
    facts = request.read_record(options.require_file(options.FILE, "--image"))
    if facts is None:
        raise MissingError(
            f"{options.FILE} has no record of its image", fix="make sqsh, or --image"
        )
    return request.record_image(facts).reference


def small_image(place: Path) -> str:
    """Create an image of this machine's shell and small files; returns its address."""
    tree = tiny_root.tree(place / "tree", ImageConfig(reference="small"))
    (tree / "usr" / "data").mkdir()
    chance = random.Random(1)
    for index in range(FILES):
        (tree / "usr" / "data" / f"{index:03}").write_bytes(chance.randbytes(20_000))
    return f"rootfs:{tree}"


def measure(image: str, place: Path, command: tuple[str, ...] | None) -> dict[str, Any]:
    """Pack, trace and count; `command` is the start, None for the recipe's."""
    programs, reporter = Programs(), Reporter()

    took: dict[HotList, list[float]] = defaultdict(list)

    def packed(name: str, hot: HotList) -> Path:
        chosen = squash.Options.of("shared", hot=hot)
        source, output = address.parse(image, programs), place / name
        before = report.cpu_seconds()
        done = rootless.call_as_root(
            lambda: squash.pack(source, output, chosen, programs, reporter), image, programs
        )
        took[hot].append(report.cpu_seconds() - before)
        return done.path

    plain = packed("plain.sqsh", NONE)
    traced = trace.trace(plain, command or trace.default_command(plain), programs, reporter)
    own = HotList.of(os.fsdecode(path) for path in traced.paths)
    hot = HotList.read(ROOT / "recipes/hot/cpu-mamba.txt") if command is None else own
    sorted_file = packed("hot.sqsh", hot)
    for _ in range(0 if command else PACKS - 1):
        for each in (NONE, hot):
            packed("again.sqsh", each).unlink()
    without, with_list = (round(statistics.median(took[each]), 1) for each in (NONE, hot))
    rows: dict[str, dict[str, float]] = {
        "folder order": {**count(plain, traced), "pack": without},
        "hot first": {**count(sorted_file, traced), "pack": with_list},
        "hot first, warm": {
            **count(sorted_file, traced, noted_range(sorted_file)),
            "pack": with_list,
        },
    }
    first, second, _ = rows.values()
    goals = {}
    for name, most in GOALS.items():
        ratio = second[name] / first[name]
        goals[name] = {"ratio": round(ratio, 3), "goal": most, "met": ratio <= most}
    return {
        "what": "bytes and requests of a cold start, counted from one trace",
        "files": len(traced.paths),
        "bytes_unpacked": traced.size,
        "rows": rows,
        "goals": goals,
    }


def noted_range(file: Path) -> HotRange:
    """Return the hot range that a file records."""
    with file.open("rb") as opened:
        found = noted(opened, superblock.read(file).used)
    assert found is not None
    return found


def count(file: Path, traced: Trace, warm: HotRange | None = None) -> dict[str, int]:
    """Count what a start reads of a file; `warm` is a range that was read before, in one piece."""
    before = range(0) if warm is None else range(warm.offset, warm.offset + warm.length)
    with open_image(file) as image:
        seen: set[int] = set()
        kept: deque[int] = deque(maxlen=SHARED)
        read = distinct = len(before)
        requests, end = int(bool(before)), before.stop
        for place, length, is_shared in _blocks(image, traced):
            if place in before:
                continue
            if place not in (kept if is_shared else seen):
                read += length
            if is_shared and place not in kept:
                kept.append(place)  # like the kernel's cache, which replaces the oldest
            if place not in seen:
                seen.add(place)
                distinct += length
                requests += place != end
                end = place + length
    found = {"size": file.stat().st_size, "read": read, "distinct": distinct}
    return {**found, "requests": requests}


def _blocks(image: Image, traced: Trace) -> Iterator[tuple[int, int, bool]]:
    """The blocks that each read needs, in order: place, length, and whether many files share it."""
    unpacked: set[tuple[bytes, int]] = set()  # blocks of each file that the kernel has in memory
    whole = image.superblock.block
    for path, offset, size in traced.reads:
        entry = image.entries.get(path)
        if entry is None or entry.kind != FILE:
            continue
        own = list(blocks(image, entry))
        for index in range(offset // whole, (offset + size - 1) // whole + 1):
            if (path, index) in unpacked:
                continue
            unpacked.add((path, index))
            is_shared = index >= len(own)
            found = fragment(image, entry.inode.data.fragment) if is_shared else own[index]
            if found.length:
                yield found.place, found.length & LENGTH, is_shared


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    table = Table("", *COLUMNS)
    for name, row in result["rows"].items():
        table.add_row(name, *(show_one(row[column]) for column, show_one in COLUMNS.items()))
    ratios = [_ratio(result, column) for column in COLUMNS]
    table.add_row("the second to the first (goal)", *ratios)
    show_table(table)
    print(f"{result['files']} files, {human(result['bytes_unpacked'])} of their content")


def _ratio(result: dict[str, Any], column: str) -> str:
    if column not in result["goals"]:
        first, second, _ = (row[column] for row in result["rows"].values())
        return f"{second / first:.2f}"
    one = result["goals"][column]
    return f"{one['ratio']:.2f} ({one['goal']}, {'met' if one['met'] else 'MISSED'})"


if __name__ == "__main__":
    options.run(main)
