"""Measure how long a cold start takes to its first training step, and what it reads meanwhile.

usage: python -m benchmarks.start [--target NAME ...] [--latency MS ...] [--reader NAME ...]
                                  [--order NAME ...] [--block SIZE ...] [--level N] [--counts]
                                  [--small] ...

Starts the training of mamba_fsdp's tiny model from a squash file, no part of which is in memory,
on a server with a latency (nbdkit's filter `delay`; nbdfuse presents it as a file), for each

target      cpu-mamba; cuda-mamba if it is named: on a stand-in for NVIDIA's base, which is built
            first, and without a GPU
latency     0, 1 and 5 ms per request
reader      what mounts the file: kernel (as root), squashfuse, squashfuse_ll; those available
order       walk: files in the order of their folders; hot: hot files first (recipes/hot); warm: the
            same, and the start reads the hot range ahead (WARM)
block       128K, 256K, 1M (cuda-mamba: 1M only); at zstd level 3, unless --level says otherwise

Each of these options can be given several times to measure only a part: `--latency 1 --reader
kernel`. New measurements replace the same rows of the result; rows of another image are removed.

Bytes and requests are counted at the server until the first step has ended, without what a machine
that is short of memory reads again. They hardly depend on the machine's other load, but seconds do:
--counts keeps no seconds. A start that reads ahead also has the seconds of reading the hot range
alone, and of a second start, with everything in memory. Writes start.json to benchmarks/results/,
and the tables and the picture of docs/background/cold-start.md. One target takes some 20 minutes on
an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import hot, options, report
from benchmarks.cold import images, page, starting
from benchmarks.cold.served import Served, busiest, distinct, require, served
from benchmarks.cold.starting import READERS, Command, Started
from benchmarks.options import ROOT
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
AXES = ("target", "level", "block", "order", "reader", "latency_ms")  # what identifies a row
PAGE = ROOT / "docs" / "background" / "cold-start.md"


def main() -> int:
    given = parsed()
    programs, reporter = Programs(), Reporter()
    require(programs)
    rows: list[dict[str, Any]] = []
    identities: dict[str, str] = {}
    for target in given.target:
        with tempfile.TemporaryDirectory(prefix="sqshforge-start-") as folder:
            identities[target], of_target = measure(given, target, Path(folder), programs, reporter)
        rows += of_target
    found = {
        "what": "cold starts of training out of a squash file, until the first step has ended",
        "how": "python -m benchmarks.start",
        "images": identities,
        "rows": rows,
        "machine": report.machine(len(os.sched_getaffinity(0))),
        "tools": starting.tools(programs),
    }
    place = options.folder(given)
    if place is not None:
        found = merged(before(place / "start.json"), found)
    return options.finish(
        given, "start", found, met=True, fill=lambda path: page.write(path, found)
    )


def parsed() -> argparse.Namespace:
    parser = options.parser(__doc__, PAGE.name)
    parser.add_argument("--target", action="append", choices=images.TARGETS)
    parser.add_argument("--latency", type=int, action="append", metavar="MS")
    parser.add_argument("--reader", action="append", choices=READERS)
    parser.add_argument("--order", action="append", choices=ORDERS)
    parser.add_argument("--block", action="append", choices=BLOCKS)
    parser.add_argument("--level", type=int, default=3, metavar="N", help="of zstd [default: 3]")
    parser.add_argument("--counts", action="store_true", help="keep no seconds")
    parser.add_argument(
        "--image", metavar="ADDRESS", help="the target's [default: build/cpu-mamba.sqsh's]"
    )
    given = options.parse(parser)
    given.target = given.target or [images.TARGETS[0]]
    if given.image and len(given.target) > 1:
        parser.error("--image: is one target's; name one --target")
    given.order = given.order or list(ORDERS)
    given.latency = given.latency or list(LATENCIES[:2] if given.small else LATENCIES)
    if min(given.latency) < 0:
        parser.error("--latency: none is below 0")
    given.reader = starting.readers(given.reader)
    return given


def measure(
    given: argparse.Namespace, target: str, place: Path, programs: Programs, reporter: Reporter
) -> tuple[str, list[dict[str, Any]]]:
    """Pack an image in each way and start each file as asked; returns its identity and rows."""
    with contextlib.ExitStack() as until_packed:
        if given.small:
            address, listed = hot.small_image(place), small_list()
        else:
            address = given.image or until_packed.enter_context(
                images.image(target, programs, reporter)
            )
            listed = images.hot_list(target)
        files = packed(given, target, address, listed, place, programs, reporter)
    command = Command.small(place) if given.small else Command.of(next(iter(files.values())))
    rows = []
    for block, order, reader, latency in chosen(given, target):
        file, is_warm = files[block, order != "walk"], order == "warm"
        with served(file, latency, programs) as behind:
            one = starting.start(behind, reader, command, is_warm=is_warm)
            more = {} if given.counts or not is_warm else in_memory(behind, reader, command)
        if more:
            with served(file, latency, programs) as behind:
                more["range_seconds"] = round(starting.read_range(behind.path), 2)
        row = {
            "target": target,
            "level": given.level,
            "block": block,
            "order": order,
            "reader": reader,
            "latency_ms": latency,
            "file_bytes": file.stat().st_size,
            **counted(one, counts=given.counts),
            **more,
        }
        rows.append(row)
        reporter.say(shown(row))
    return identity(files), rows


def in_memory(behind: Served, reader: str, command: Command) -> dict[str, float]:
    """Time a start for which an earlier one has brought everything into memory."""
    again = starting.start(behind, reader, command, is_warm=True)
    return {"memory_seconds": round(again.seconds, 2)}


def blocks(given: argparse.Namespace, target: str) -> list[str]:
    """Return the block sizes given on the command line, or those of a target."""
    if given.block:
        asked: list[str] = given.block
        return asked
    if given.small:
        return list(BLOCKS[:1])
    return list(BLOCKS if target == images.TARGETS[0] else BLOCKS[-1:])


def identity(files: dict[tuple[str, bool], Path]) -> str:
    """Return what distinguishes the image of these files from others."""
    facts = request.read_record(next(iter(files.values())))
    assert facts is not None
    of_image = request.record_image(facts)
    return of_image.digest or of_image.reference


def chosen(given: argparse.Namespace, target: str) -> list[tuple[str, str, str, int]]:
    """Return the requested combinations in random order, which favors none."""
    every = [
        (block, order, reader, latency)
        for block in blocks(given, target)
        for order in given.order
        for reader in given.reader
        for latency in given.latency
    ]
    return random.Random(0).sample(every, len(every))


def packed(
    given: argparse.Namespace,
    target: str,
    image: str,
    listed: HotList,
    place: Path,
    programs: Programs,
    reporter: Reporter,
) -> dict[tuple[str, bool], Path]:
    """Pack the image in each requested way; returns files by block size and "hot files first"."""

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
        for block in blocks(given, target)
        for is_hot in sorted({order != "walk" for order in given.order})
    }


def small_list() -> HotList:
    """Return the files that the small run's start reads."""
    return HotList.of(f"usr/data/{index:03}" for index in range(5, hot.FILES, 10))


def counted(one: Started, *, counts: bool) -> dict[str, Any]:
    """Return the figures of a start that go into its row."""
    new = distinct(one.requests)
    asked, size = (sum(read.length for read in reads) for reads in (one.requests, new))
    found: dict[str, Any] = {
        "bytes": size,
        "requests": len(new),
        "bytes_again": max(0, asked - size),  # pages are whole, except the file's last one
    }
    if not counts:
        most, count = busiest(new)
        found |= {"seconds": round(one.seconds, 2), "busiest_bytes": most, "busiest": count}
    return found


def shown(row: dict[str, Any]) -> str:
    """Format a row as one line."""
    took = f", {row['seconds']:.1f} s" if "seconds" in row else ""
    of = ", ".join(row[axis] for axis in ("target", "reader", "block", "order"))
    return (
        f"{of}, {row['latency_ms']} ms: {human(row['bytes'])} in {row['requests']} requests{took}"
    )


def before(path: Path) -> dict[str, Any]:
    """Return the existing result; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a result plus an older one's rows for other targets and for the same images.

    A row that was only counted anew keeps its seconds.
    """
    known = old.get("images", {})
    outdated = {target for target, image in new["images"].items() if known.get(target) != image}
    kept = [row for row in old.get("rows", ()) if row["target"] not in outdated]
    rows = {tuple(row[axis] for axis in AXES): row for row in kept}
    for row in new["rows"]:
        key = tuple(row[axis] for axis in AXES)
        rows[key] = {**rows.get(key, {}), **row}
    images_of = {**known, **new["images"]}
    return {**new, "images": images_of, "rows": [rows[key] for key in sorted(rows)]}


if __name__ == "__main__":
    options.run(main)
