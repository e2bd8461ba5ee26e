"""What must be sent where the file of an earlier build is: by rsync, by casync, by zstd.

usage: python -m benchmarks.delta [--file FILE] [--change NAME ...] [--order NAME ...] [--small] ...

Unpacks a squash file, changes its tree as another build would, and packs the tree before and after
the change, with hot files first (recipes/hot) and without. Each tool then makes the second file out
of the first one, which is compared. Changes:

edit      one more line in one file of training/, its byte code, and the record of the build
package   another version of one package (--package); all packages are installed anew: their files
          get another time, their content, byte code included, stays
torch     the same from one patch release of torch to the next (--torch). The public index has such
          releases without CUDA's libraries for Arm alone, so these are Arm's files, and none is run

rsync     bytes sent and received, where the receiver has the first file under the same name
casync    the index, and the chunks that the first file lacks, compressed as they lie in the store
zstd      the size of what `zstd --patch-from` writes

Of each also the CPU seconds of both ends together, of the receiver alone (rsync's ends cannot be
kept apart), and the peak of memory. FILE is build/cpu-mamba.sqsh. Tools that are not installed are
left out. Writes delta.json to benchmarks/results/, and the table of docs/background/delta.md.
Nothing is timed by the clock, so any machine does; it takes 12 GB of disk in TMPDIR.
"""

from __future__ import annotations

import argparse
import csv
import filecmp
import json
import os
import py_compile
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import options, pages
from benchmarks.cold.page import ORDERS
from benchmarks.options import ROOT
from benchmarks.pages import size, table
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.programs import Programs, failed
from sqshforge.host.terminal import Reporter, human
from sqshforge.hot import NONE, HotList
from sqshforge.image import address
from sqshforge.image.enroot import ImageConfig
from sqshforge.squash import pack as squash
from sqshforge.squash.stage import Identity
from tests.support import tiny_root

TOOLS = ("rsync", "casync", "zstd")
PACKED = ("walk", "hot")
AXES = ("change", "order", "tool")
PACKAGE, TORCH = "pyyaml==6.0.2", ("torch==2.9.0", "torch==2.9.1")
PLATFORM = "manylinux_2_28_aarch64"  # of torch
WINDOW = "--long=31"  # zstd finds what is alike up to 2 GiB apart
PAGE = ROOT / "docs" / "background" / "delta.md"
LATER = 86_400  # seconds between the two builds


def main() -> int:
    given = parsed()
    programs, reporter = Programs(), Reporter()
    with tempfile.TemporaryDirectory(prefix="sqshforge-delta-") as folder:
        for result in measure(given, Path(folder), programs, reporter):
            keep(given, result)  # after each change: all of it takes a while
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
    """Keep a result, with the rows of an earlier one for other changes, orders and tools."""
    place = options.folder(given)
    if place is not None and (place / "delta.json").exists():
        result = merged(json.loads((place / "delta.json").read_text()), result)

    def fill(path: Path) -> None:
        path.write_text(pages.fill(path.read_text(), {"delta": shown(result)}))

    options.finish(given, "delta", result, met=True, fill=fill)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A result with what an older one of the same file has beside it."""
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
                facts_of(site_of(tree), name_of(wanted))  # before minutes of packing

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


def small(tree: Path) -> HotList:
    """A tree of this machine's shell, packages and training code; half of it is hot."""
    tiny_root.tree(tree, ImageConfig(reference="small"))
    site = tree / "usr/local/lib/python3.11/dist-packages"
    chance = random.Random(1)
    for name in ("first", "torch", "yaml"):
        (site / name).mkdir(parents=True)
        for index in range(20):
            (site / name / f"{index:02}.py").write_bytes(chance.randbytes(20_000))
    (tree / "sqshforge/training").mkdir(parents=True)
    (tree / "sqshforge/training/cli.py").write_text("VALUE = 1\n")
    return HotList.of(f"usr/local/lib/python3.11/dist-packages/torch/{n:02}.py" for n in range(20))


# Changes: each changes a tree, and returns a description of what it did.


def edit(tree: Path, given: argparse.Namespace, programs: Programs) -> str:
    """Add a line to a module, and compile it."""
    module = tree / "sqshforge/training/cli.py"
    module.write_text(module.read_text() + "EDITED = True\n")
    py_compile.compile(
        str(module), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    for record in tree.glob("sqshforge/meta/provenance.json"):  # of another build, another time
        record.write_text(record.read_text().replace('"created": "', '"created": "1'))
    return "one more line in training/cli.py"


def package(tree: Path, given: argparse.Namespace, programs: Programs) -> str:
    """Replace one package."""
    return made_up(tree, "yaml") if given.small else replaced(tree, given.package, programs)


def torch(tree: Path, given: argparse.Namespace, programs: Programs) -> str:
    """Replace torch."""
    if given.small:
        return made_up(tree, "torch")
    replaced(tree, given.torch[1], programs, PLATFORM)
    return f"{given.torch[0]} to {given.torch[1].partition('==')[2]}, for Arm".replace("==", " ")


def made_up(tree: Path, name: str) -> str:
    """Replace a file of a package of the small run."""
    site = site_of(tree)
    (site / name / "00.py").write_bytes(random.Random(2).randbytes(20_100))
    later(site)
    return f"{name}, made up"


def replaced(tree: Path, wanted: str, programs: Programs, platform: str = "") -> str:
    """Put another version of a package into a tree, all of whose packages get a later time."""
    site = site_of(tree)
    name, version = name_of(wanted), wanted.partition("==")[2]
    before = removed(site, name)
    added = tree.with_name(f"{tree.name}-added")
    argv: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    argv += ["--no-compile", "--disable-pip-version-check", "--root-user-action=ignore"]
    argv += ["--platform", platform, "--only-binary=:all:"] if platform else []
    programs.capture([*argv, "--target", added, wanted])
    shutil.rmtree(added / "bin", ignore_errors=True)
    argv = [sys.executable, "-m", "compileall", "-qq", "-s", added]
    argv += ["-p", f"/{site.relative_to(tree)}", "--invalidation-mode", "unchecked-hash", added]
    programs.attempt(argv)  # as in a build, a few files for other versions of Python stay
    shutil.copytree(added, site, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(added)
    later(site)
    return f"{name} {before} to {version}"


def site_of(tree: Path) -> Path:
    """Where a tree has its packages."""
    where = "usr/local/lib/python3*/dist-packages"
    for found in tree.glob(where):
        return found
    raise RequestError(f"--file: the image has no folder {where}", fix="name one of cpu-mamba")


def name_of(wanted: str) -> str:
    """The name in NAME==VERSION, as indexes compare names: huggingface_hub is huggingface-hub."""
    return re.sub(r"[-_.]+", "-", wanted.partition("==")[0].strip()).lower()


def facts_of(site: Path, name: str) -> Path:
    """The folder of facts about a package; `RequestError` where that is not installed."""
    for one in site.glob("*.dist-info"):
        if name_of(one.name.partition("-")[0]) == name:
            return one
    raise RequestError(
        f"the image has no package {name} to replace by another version",
        fix="--package NAME==VERSION of one that is in its recipe's lock file",
    )


def later(site: Path) -> None:
    """Give all packages the time of another build."""
    for path in [site, *site.rglob("*")]:
        time = path.lstat().st_mtime + LATER
        os.utime(path, (time, time), follow_symlinks=False)


def removed(site: Path, name: str) -> str:
    """Remove a package's files, as its list has them; its version."""
    facts = facts_of(site, name)
    with (facts / "RECORD").open(newline="") as file:
        paths = [site / row[0] for row in csv.reader(file)]
    for path in paths:
        for one in (path, *path.parent.glob(f"__pycache__/{path.stem}.*.pyc")):
            if one.is_relative_to(site):
                one.unlink(missing_ok=True)
    return facts.name.removesuffix(".dist-info").partition("-")[2]


CHANGES: Mapping[str, Callable[[Path, argparse.Namespace, Programs], str]] = {
    "edit": edit,
    "package": package,
    "torch": torch,
}


# Tools: each makes the file `after` out of `before` in an empty folder, and returns what that took.


@dataclass(frozen=True)
class Sent:
    """Bytes that are sent; CPU seconds, of both ends and of the receiver; the peak of memory."""

    bytes: int
    cpu_seconds: float
    receiver_cpu_seconds: float | None  # None: not known apart
    memory_bytes: int


def by_rsync(before: Path, after: Path, work: Path, programs: Programs) -> Sent:
    """As between two machines; between two folders rsync would copy the whole file."""
    there = work / "there.sqsh"
    shutil.copyfile(before, there)
    argv: list[str | Path] = ["rsync", "--no-whole-file", "--ignore-times", "--stats", after, there]
    said, cpu, memory = used(argv)
    found = re.findall(r"Total bytes (?:sent|received): ([\d,.]+)", said)
    same(there, after)
    return Sent(sum(int(re.sub(r"\D", "", one)) for one in found), cpu, None, memory)


def by_casync(before: Path, after: Path, work: Path, programs: Programs) -> Sent:
    """Chunks that the first file has are taken from it; casync finds them by chunking it again."""
    had, store = work / "had", work / "store.castr"
    used(["casync", "make", f"--store={had}", work / "had.caibx", before])
    _, cpu, memory = used(["casync", "make", f"--store={store}", work / "index.caibx", after])
    here = {path.name for path in had.rglob("*.cacnk")}
    new = [path for path in store.rglob("*.cacnk") if path.name not in here]
    sent = (work / "index.caibx").stat().st_size + sum(path.stat().st_size for path in new)
    argv: list[str | Path] = ["casync", "extract", f"--store={store}", f"--seed={before}"]
    _, more, most = used([*argv, work / "index.caibx", work / "made.sqsh"])
    same(work / "made.sqsh", after)
    return Sent(sent, round(cpu + more, 1), more, max(memory, most))


def by_zstd(before: Path, after: Path, work: Path, programs: Programs) -> Sent:
    """A patch, made where both files are, and applied where the first one is."""
    patch, made = work / "patch.zst", work / "made.sqsh"
    words: list[str | Path] = ["zstd", "-q", WINDOW, f"--patch-from={before}"]
    _, cpu, memory = used([*words, after, "-o", patch])
    _, more, most = used([*words, "-d", patch, "-o", made])
    same(made, after)
    return Sent(patch.stat().st_size, round(cpu + more, 1), more, max(memory, most))


SENDERS: Mapping[str, Callable[[Path, Path, Path, Programs], Sent]] = {
    "rsync": by_rsync,
    "casync": by_casync,
    "zstd": by_zstd,
}


def used(argv: list[str | Path]) -> tuple[str, float, int]:
    """What a program prints; CPU seconds and peak bytes of it and its children."""
    words = [str(word) for word in argv]
    code = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:])\n"
    code += "u = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    code += "print(f'\\n{u.ru_utime + u.ru_stime:.1f} {u.ru_maxrss * 1024}')\n"
    code += "sys.exit(done.returncode)"
    done = Programs().attempt([sys.executable, "-c", code, *words])
    if done.code != 0:
        raise failed(words, done.code, (done.err or done.out).splitlines())
    said, _, last = done.out.rstrip().rpartition("\n")
    cpu, memory = last.split()
    return said, float(cpu), int(memory)


def same(made: Path, wanted: Path) -> None:
    """Raise `WorkError` where a tool has not made the file that it was to make."""
    if not filecmp.cmp(made, wanted, shallow=False):
        raise WorkError("the tool made a file that is not the second one", where=str(made))


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
    """A cell; empty where a tool was not there when the others were measured."""
    return f"{size(row['bytes'])}, {row['cpu_seconds']:.1f} s" if row else ""


if __name__ == "__main__":
    options.run(main)
