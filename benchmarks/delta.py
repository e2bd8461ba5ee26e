"""Measure how much must be sent to a machine that has an earlier build's file: rsync, casync, zstd.

usage: python -m benchmarks.delta [--file FILE] [--change NAME ...] [--order NAME ...] [--small] ...

Unpacks a squash file, changes its tree as another build would, and packs the tree before and after
the change, both with hot files first (recipes/hot) and without. Each tool then reconstructs the
second file from the first, and the result is compared. Changes:

edit      one more line in one file of training/, its byte code, and the record of the build
package   another version of one package (--package); all packages are installed anew: their files
          get a new time, but their content, byte code included, stays the same
torch     the same from one patch release of torch to the next (--torch). The public index has such
          releases without CUDA's libraries only for Arm, so these are Arm's files; none is run

rsync     bytes sent and received, where the receiver has the first file under the same name
casync    the index, and the chunks that the first file lacks, compressed as in the store
zstd      the size of the output of `zstd --patch-from`

Each also reports the CPU seconds of both ends together and of the receiver alone (rsync's two ends
cannot be separated), and the peak of memory. FILE is build/cpu-mamba.sqsh. Tools that are not
installed are left out. Writes delta.json to benchmarks/results/, and the table of
docs/background/delta.md. No wall-clock time is measured, so any machine will do; it needs 12 GB of
disk in TMPDIR.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import options, pages
from benchmarks.changes import (
    CHANGES,
    PACKAGE,
    PLATFORM,
    TORCH,
    facts_of,
    name_of,
    replaced,
    site_of,
    small,
)
from benchmarks.cold.page import ORDERS
from benchmarks.options import ROOT
from benchmarks.pages import size, table
from benchmarks.senders import SENDERS
from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, human
from sqshforge.hot import NONE, HotList
from sqshforge.image import address
from sqshforge.squash import pack as squash
from sqshforge.squash.stage import Identity

TOOLS = tuple(SENDERS)
PACKED = ("walk", "hot")
AXES = ("change", "order", "tool")
PAGE = ROOT / "docs" / "background" / "delta.md"


def main() -> int:
    given = parsed()
    programs, reporter = Programs(), Reporter()
    with tempfile.TemporaryDirectory(prefix="sqshforge-delta-") as folder:
        for result in measure(given, Path(folder), programs, reporter):
            keep(given, result)  # after each change, as all of them take a while
    return 0


def parsed() -> argparse.Namespace:
    parser = options.parser(__doc__, PAGE.name)
    parser.add_argument("--file", type=Path, default=options.FILE)
    parser.add_argument("--change", action="append", choices=CHANGES)
    parser.add_argument("--order", action="append", choices=PACKED)
    parser.add_argument("--package", default=PACKAGE, metavar="NAME==VERSION")
    parser.add_argument("--torch", nargs=2, default=TORCH, metavar="torch==VERSION")
    given = options.parse(parser)
    given.change = given.change or list(CHANGES)
    given.order = given.order or list(PACKED)
    for wanted in (given.package, *given.torch):
        if "==" not in wanted:
            parser.error(f"{wanted!r} has no version: NAME==VERSION")
    return given


def keep(given: argparse.Namespace, result: dict[str, Any]) -> None:
    """Store a result, together with an earlier one's rows for other changes, orders and tools."""
    place = options.folder(given)
    if place is not None and (place / "delta.json").exists():
        result = merged(json.loads((place / "delta.json").read_text()), result)

    def fill(path: Path) -> None:
        path.write_text(pages.fill(path.read_text(), {"delta": shown(result)}))

    options.finish(given, "delta", result, met=True, fill=fill)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a result plus the rows that an earlier one for the same file has in addition."""
    if old.get("file") != new["file"]:
        return new
    rows = {tuple(row[axis] for axis in AXES): row for row in (*old["rows"], *new["rows"])}
    places = [list(CHANGES), list(PACKED), list(TOOLS)]
    ordered = sorted(rows, key=lambda key: [a.index(b) for a, b in zip(places, key, strict=True)])
    return {
        **new,
        "changes": {**old["changes"], **new["changes"]},
        "tools": {**old["tools"], **new["tools"]},
        "rows": [rows[key] for key in ordered],
    }


def measure(
    given: argparse.Namespace, place: Path, programs: Programs, reporter: Reporter
) -> Iterator[dict[str, Any]]:
    """Pack the tree before and after each change, and have each tool make the second file.

    Yields the result so far after each change.
    """
    tools = [one for one in TOOLS if programs.which(one)]
    if not tools:
        raise MissingError("no tool is installed", fix=f"apt-get install {' '.join(TOOLS)}")
    versions = {
        one: programs.attempt([one, "--version"]).out.strip().partition("\n")[0] for one in tools
    }
    tree = place / "tree"
    if given.small:
        listed = small(tree)
    else:
        file = options.require_file(given.file)
        programs.capture(["unsquashfs", "-quiet", "-no-progress", "-dest", tree, file])
        listed = HotList.read(ROOT / "recipes/hot/cpu-mamba.txt")
        for change, wanted in (("package", given.package), ("torch", given.torch[0])):
            if change in given.change:
                facts_of(site_of(tree), name_of(wanted))  # fail now, not after minutes of packing

    def packed(of: Path, order: str) -> Path:
        chosen = squash.Options.of("shared", hot=listed if order == "hot" else NONE)
        output = place / f"{of.name}-{order}.sqsh"
        source = address.parse(f"rootfs:{of}", programs)
        return squash.pack(source, output, chosen, programs, reporter).path

    def copied(name: str) -> Path:
        programs.capture(["cp", "--archive", "--reflink=auto", tree, place / name])
        return place / name

    ours = {order: packed(tree, order) for order in given.order}
    rows: list[dict[str, Any]] = []
    what: dict[str, str] = {}
    for change in given.change:
        before = ours
        if change == "torch" and not given.small:
            other = copied("earlier")
            replaced(other, given.torch[0], programs, PLATFORM)
            before = {order: packed(other, order) for order in given.order}
            shutil.rmtree(other)
        changed = copied(change)
        what[change] = CHANGES[change](changed, given, programs)
        for order in given.order:
            after = packed(changed, order)
            for tool in tools:
                with tempfile.TemporaryDirectory(dir=place) as work:
                    sent = SENDERS[tool](before[order], after, Path(work), programs)
                row = {"change": change, "order": order, "tool": tool}
                rows.append({**row, "file_bytes": after.stat().st_size, **vars(sent)})
                reporter.say(f"{change}, {order}, {tool}: {human(sent.bytes)}")
            after.unlink()
        shutil.rmtree(changed)
        yield {
            "what": "bytes that are sent to make the file of a build out of that of an earlier one",
            "how": "python -m benchmarks.delta",
            "file": "made up" if given.small else str(Identity.of(given.file).digest),
            "changes": what,
            "rows": rows,
            "tools": versions,
        }


def shown(result: Mapping[str, Any]) -> str:
    """The table of docs/background/delta.md."""
    rows = result["rows"]
    if not rows:
        return "Not measured yet; `.venv/bin/python -m benchmarks.delta` fills this in."
    tools = [one for one in TOOLS if any(row["tool"] == one for row in rows)]
    found = {(row["change"], row["order"], row["tool"]): row for row in rows}
    lines = []
    for change, order in dict.fromkeys((row["change"], row["order"]) for row in rows):
        cells = [found.get((change, order, tool)) for tool in tools]
        lines.append(
            [
                result["changes"][change],
                ORDERS[order],
                size(next(one["file_bytes"] for one in cells if one)),
                *map(_sent, cells),
            ]
        )
    return table(["change", "packed", "file", *tools], lines)


def _sent(row: Mapping[str, Any] | None) -> str:
    """Format a cell; empty if the tool was missing when the others were measured."""
    return f"{size(row['bytes'])}, {row['cpu_seconds']:.1f} s" if row else ""


if __name__ == "__main__":
    options.run(main)
