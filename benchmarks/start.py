"""How long a cold start takes to its first training step, and what it reads meanwhile.

usage: python -m benchmarks.start [--latency MS ...] [--reader NAME ...] [--order NAME ...]
                                  [--block SIZE ...] [--level N] [--counts] [--small] ...

Starts the training of cpu-mamba's tiny model out of a squash file of which nothing is in memory,
from a server with a latency (nbdkit's filter `delay`; nbdfuse makes a file of it), for each

latency     0, 1 and 5 ms a request
reader      what mounts the file: kernel (as root), squashfuse, squashfuse_ll; those that are here
order       walk: files in the order of their folders; hot: hot files first (recipes/hot); warm: the
            same, and the start reads the hot range ahead (WARM)
block       128K, 256K, 1M; at zstd level 3, unless --level says another

Each of these options can be given several times, and measures a part: `--latency 1 --reader
kernel`. What is measured replaces the same rows of the result; rows of another image are removed.

Bytes and requests are those of the server until the first step has ended, but for what a machine
that is short of memory reads again. They hardly depend on what else it does, seconds do: --counts
keeps none. Writes start.json to benchmarks/results/, and the tables and the picture of
docs/background/cold-start.md. All of it takes some 20 minutes of a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import hot, options, report
from benchmarks.cold import page, starting
from benchmarks.cold.served import busiest, distinct, require, served
from benchmarks.cold.starting import READERS, Command, Started
from benchmarks.options import ROOT
from sqshforge.errors import SqshforgeError
from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, human
from sqshforge.hot import NONE, HotList
from sqshforge.image import address
from sqshforge.squash import pack as squash
from sqshforge.squash import request

LATENCIES = (0, 1, 5)  # milliseconds
ORDERS = ("walk", "hot", "warm")
BLOCKS = ("128K", "256K", "1M")
AXES = ("level", "block", "order", "reader", "latency_ms")  # what a row is of
PAGE = ROOT / "docs" / "background" / "cold-start.md"


def main() -> int:
    given = parsed()
    programs, reporter = Programs(), Reporter()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        require(programs)
        with tempfile.TemporaryDirectory(prefix="sqshforge-start-") as folder:
            found = measure(given, Path(folder), programs, reporter)
    except SqshforgeError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    place = options.folder(given)
    if place is not None:
        found = merged(before(place / "start.json"), found)
        docs = options.docs(given)
        if docs is not None:
            page.write(docs / PAGE.name, found)
    return options.finish(given, "start", found, met=True)


def parsed() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--latency", type=int, action="append", metavar="MS")
    parser.add_argument("--reader", action="append", choices=READERS)
    parser.add_argument("--order", action="append", choices=ORDERS)
    parser.add_argument("--block", action="append", choices=BLOCKS)
    parser.add_argument("--level", type=int, default=3, metavar="N", help="of zstd [default: 3]")
    parser.add_argument("--counts", action="store_true", help="keep no seconds")
    parser.add_argument("--image", metavar="ADDRESS", help="[default: build/cpu-mamba.sqsh's]")
    options.add_docs(parser)
    given = parser.parse_args()
    given.reader = given.reader or starting.usable()
    given.order = given.order or list(ORDERS)
    given.latency = given.latency or list(LATENCIES[:2] if given.small else LATENCIES)
    given.block = given.block or list(BLOCKS[:1] if given.small else BLOCKS)
    if min(given.latency) < 0:
        parser.error("--latency: none is below 0")
    return given


def measure(
    given: argparse.Namespace, place: Path, programs: Programs, reporter: Reporter
) -> dict[str, Any]:
    """Pack the image in each way, and start each file as asked for."""
    image = hot.small_image(place) if given.small else given.image or hot.packed_from()
    files = packed(given, image, place, programs, reporter)
    command = Command.small(place) if given.small else Command.of(next(iter(files.values())))
    rows = []
    for block, order, reader, latency in chosen(given):
        file = files[block, order != "walk"]
        with served(file, latency, programs) as behind:
            one = starting.start(behind, reader, command, is_warm=order == "warm")
        row = {
            "level": given.level,
            "block": block,
            "order": order,
            "reader": reader,
            "latency_ms": latency,
            "file_bytes": file.stat().st_size,
            **counted(one, counts=given.counts),
        }
        rows.append(row)
        reporter.say(shown(row))
    return {
        "what": "cold starts of training out of a squash file, until the first step has ended",
        "how": "python -m benchmarks.start",
        "image": identity(files),
        "rows": rows,
        "machine": report.machine(len(os.sched_getaffinity(0))),
        "tools": starting.tools(programs),
    }


def identity(files: dict[tuple[str, bool], Path]) -> str:
    """What tells the image of these files from others."""
    facts = request.read_record(next(iter(files.values())))
    assert facts is not None
    of_image = request.record_image(facts)
    return of_image.digest or of_image.reference


def chosen(given: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """The combinations that are asked for, in an order that favours none."""
    every = [
        (block, order, reader, latency)
        for block in given.block
        for order in given.order
        for reader in given.reader
        for latency in given.latency
    ]
    return random.Random(0).sample(every, len(every))


def packed(
    given: argparse.Namespace, image: str, place: Path, programs: Programs, reporter: Reporter
) -> dict[tuple[str, bool], Path]:
    """The image packed in each way that is asked for, by block and whether hot files come first."""
    listed = small_list() if given.small else HotList.read(ROOT / "recipes/hot/cpu-mamba.txt")

    def one(block: str, is_hot: bool) -> Path:
        plain = squash.Options.of("shared", hot=listed if is_hot else NONE)
        words = replace(plain, block=block, level=given.level)
        source = address.parse(image, programs)
        output = place / f"{block}-{'hot' if is_hot else 'walk'}.sqsh"
        done = rootless.call_as_root(
            lambda: squash.pack(source, output, words, programs, reporter), image, programs
        )
        return done.path

    return {
        (block, is_hot): one(block, is_hot)
        for block in given.block
        for is_hot in sorted({order != "walk" for order in given.order})
    }


def small_list() -> HotList:
    """The files that the small run's start reads."""
    return HotList.of(f"usr/data/{index:03}" for index in range(5, hot.FILES, 10))


def counted(one: Started, *, counts: bool) -> dict[str, Any]:
    """What is kept of a start."""
    new = distinct(one.requests)
    asked, size = (sum(read.length for read in reads) for reads in (one.requests, new))
    found: dict[str, Any] = {
        "bytes": size,
        "requests": len(new),
        "bytes_again": max(0, asked - size),  # pages are whole, the file's last one is not
    }
    if not counts:
        most, count = busiest(new)
        found |= {"seconds": round(one.seconds, 2), "busiest_bytes": most, "busiest": count}
    return found


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    took = f", {row['seconds']:.1f} s" if "seconds" in row else ""
    return (
        f"{row['reader']}, {row['block']}, {row['order']}, {row['latency_ms']} ms: "
        f"{human(row['bytes'])} in {row['requests']} requests{took}"
    )


def before(path: Path) -> dict[str, Any]:
    """The result that is there; nothing where there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A result with what an older one has beside it, if that is of the same image.

    A row that was counted anew keeps its seconds.
    """
    if old.get("image") != new["image"]:
        return new
    rows = {tuple(row[axis] for axis in AXES): row for row in old["rows"]}
    for row in new["rows"]:
        key = tuple(row[axis] for axis in AXES)
        rows[key] = {**rows.get(key, {}), **row}
    return {**new, "rows": [rows[key] for key in sorted(rows)]}


if __name__ == "__main__":
    sys.exit(main())
