"""How long packing takes, beside the least that it could take, and what it takes of the machine.

usage: python -m benchmarks.pack [--runs 5] [--small] [--no-reference] [--output DIR]

Packs one image of 1.6 GB (benchmarks/image.py) from a docker daemon of its own, in every way that
there is, and holds the medians against the goals. All rows are whole commands, one after the
other in each round, after a round that does not count; the image's files are in the page cache.
Writes pack.json and pack.png to benchmarks/results/ and exits 1 where a goal is missed.

--small takes an image of 130 MB, to try the benchmark itself, and writes only to --output.
Needs root (it mounts the daemon's layers, and runs one row as an ordinary user) and docker.io; for
the row with reflinks mkfs.xfs (xfsprogs), and for one reference row tar2sqfs (squashfs-tools-ng).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import image
from sqshforge.disk import require_space
from sqshforge.errors import MissingError, SqshforgeError, WorkError
from sqshforge.mksquashfs import PROFILES, Options, Squasher
from sqshforge.programs import Programs, failed
from sqshforge.progress import Reporter, Tracker
from sqshforge.terminal import show_table
from sqshforge.units import human
from tests import footprint
from tests.engines import CLIENT, daemon

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOBODY = 65534
PROFILE = "shared"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A command to be timed, and what comes before it and does not count."""

    name: str
    what: str
    argv: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A goal: a row takes at most `factor` times the slowest of other rows (or seconds)."""

    row: str
    factor: float
    of: tuple[str, ...] = ()

    def seconds(self, medians: Mapping[str, float]) -> float:
        return self.factor * max((medians[name] for name in self.of), default=1.0)

    def goal(self) -> str:
        if not self.of:
            return f"<= {self.factor:g} s"
        of = self.of[0] if len(self.of) == 1 else f"max({', '.join(self.of)})"
        return f"<= {self.factor:g} x {of}"

    def result(self, medians: Mapping[str, float]) -> dict[str, Any]:
        limit = self.seconds(medians)
        return {
            "row": self.row,
            "goal": self.goal(),
            "ratio": round(self.factor * medians[self.row] / limit, 3),
            "met": medians[self.row] <= limit,
        }


BARS = (
    Bar(row="cold, mounted", factor=1.10, of=("floor",)),
    Bar(row="cold, streamed", factor=1.15, of=("floor", "export")),
    Bar(row="after an edit", factor=0.10, of=("cold, mounted",)),
    Bar(row="after an edit, reflink", factor=0.10, of=("cold, mounted",)),
    Bar(row="nothing changed", factor=1.0),
)


class Rig:
    """The image in its daemon, and the commands that pack it, in a folder that goes away."""

    def __init__(self, folder: Path, bench: image.Bench, socket: Path, programs: Programs) -> None:
        self.folder = folder
        self.bench = bench
        self.programs = programs
        self.built = ""
        self.edits = 0
        self.group = socket.stat().st_gid
        self.options = Options.of(PROFILE)
        for name in ("mount", "floor", "root", "user", "warm", "reflink", "tree"):
            (folder / name).mkdir()
        os.chown(folder / "user", NOBODY, NOBODY)

    def rows(self, *, reflink: bool) -> list[Row]:
        floor: list[str | Path] = [
            "mksquashfs",
            self.folder / "mount",
            self.folder / "floor" / "out.sqsh",
        ]
        first, edited = f"dockerd://{image.NAME}", f"dockerd://{image.EDITED}"
        again = self._pack(edited, self.folder / "warm")
        shared = Row(
            name="after an edit, reflink",
            what="the same where a copy shares its blocks: output and cache on XFS",
            argv=self._pack(edited, self.folder / "reflink"),
            env=self._places("reflink"),
            before=self._edit,
        )
        return [
            Row(
                name="floor",
                what="mksquashfs on a read-only overlay mount of the image's layers",
                argv=[*floor, *self._squash_words()],
                before=lambda: _empty(self.folder / "floor"),
            ),
            self.cold_mounted(),
            Row(
                name="export",
                what="docker export to /dev/null",
                argv=self._export(">/dev/null"),
            ),
            Row(
                name="cold, streamed",
                what="pack by a user who may not read the daemon's layers, nothing cached",
                argv=[*self.as_user(), *self._pack(first, self.folder / "user")],
                env=self._places("user") | {"HOME": str(self.folder / "user")},
                before=lambda: _empty(self.folder / "user"),
            ),
            Row(
                name="after an edit",
                what="pack after an edit of one file of training/, the rest cached",
                argv=again,
                env=self._places("warm"),
                before=self._edit,
            ),
            Row(
                name="nothing changed",
                what="pack the same image again",
                argv=again,
                env=self._places("warm"),
            ),
            *([shared] if reflink else []),
        ]

    def cold_mounted(self) -> Row:
        return Row(
            name="cold, mounted",
            what="pack by root, nothing cached",
            argv=self._pack(f"dockerd://{image.NAME}", self.folder / "root"),
            env=self._places("root"),
            before=lambda: _empty(self.folder / "root"),
        )

    def references(self) -> list[Row]:
        """What else could be done by hand; pack also sees its output safely on the disk."""
        out = self.folder / "floor" / "out.sqsh"
        tree = self.folder / "tree"
        squash = shlex.join(self._squash_words())
        level, block = PROFILES[PROFILE]
        jobs = self.options.jobs
        rows = {
            "export | mksquashfs -tar": f"| mksquashfs - {out} -tar {squash} >/dev/null",
            "export, tar -x, mksquashfs": (
                f"| tar -x -C {tree} --numeric-owner --exclude='dev/*' --exclude=.dockerenv"
                f" && mksquashfs {tree} {out} {squash} >/dev/null"
            ),
        }
        if self.programs.which("tar2sqfs"):
            rows["export | tar2sqfs"] = (
                f"| tar2sqfs -q -c zstd -X level={level} -b {block} -j {jobs} -e -x {out}"
            )

        def before() -> None:
            _empty(self.folder / "floor")
            _empty(tree)

        synced = f"mksquashfs {self.folder / 'mount'} {out} {squash} && sync {out}"
        return [
            Row(name="floor, synced", what="once", argv=["bash", "-ec", synced], before=before),
            *(
                Row(name=name, what="once", argv=self._export(rest), before=before)
                for name, rest in sorted(rows.items())
            ),
        ]

    def warm(self, name: str) -> None:
        """Pack the image once where a cached row has its cache."""
        argv = self._pack(f"dockerd://{image.NAME}", self.folder / name)
        _run(argv, self._places(name), self.programs)

    def as_user(self) -> list[str]:
        """The words before a command that an ordinary user of docker gives."""
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", f"--groups={self.group}"]
        return [*words, "--inh-caps=-all"]

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """The image's layers, read-only, where the floor finds them."""
        asked = self.programs.capture([CLIENT, "image", "inspect", image.NAME])
        layers = json.loads(asked)[0]["GraphDriver"]["Data"]
        lower = ":".join(layers[name] for name in ("UpperDir", "LowerDir") if layers.get(name))
        point = self.folder / "mount"
        options = f"ro,lowerdir={lower}"
        self.programs.capture(["mount", "-t", "overlay", "overlay", "-o", options, point])
        try:
            yield point
        finally:
            self.programs.capture(["umount", point])

    @contextlib.contextmanager
    def reflinks(self) -> Iterator[bool]:
        """Have a file system with reflinks for its row; false where none can be made."""
        if self.programs.which("mkfs.xfs") is None:
            yield False
            return
        disk, point = self.folder / "disk", self.folder / "reflink"
        self.programs.capture(["truncate", "-s", "4G", disk])
        self.programs.capture(["mkfs.xfs", "-q", disk])
        self.programs.capture(["mount", "-o", "loop", disk, point])
        try:
            yield True
        finally:
            self.programs.capture(["umount", point])

    def _edit(self) -> None:
        self.edits += 1
        before, self.built = self.built, self.bench.build(image.EDITED, self.edits)
        if self.built == before:
            raise WorkError("the edit made no other image", where=image.EDITED)

    def _pack(self, source: str, folder: Path) -> list[str | Path]:
        output = folder / "out.sqsh"
        words: list[str | Path] = [sys.executable, "-m", "sqshforge", "pack", source]
        return [*words, "-o", output, "--profile", PROFILE]

    def _places(self, name: str) -> dict[str, str]:
        """The cache and the temporary folder beside an output."""
        folder = self.folder / name
        return {"SQSHFORGE_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}

    def _squash_words(self) -> list[str]:
        """The options that pack itself gives, so that the rows differ in nothing else."""
        tracker = Tracker("", None, "bytes")
        return Squasher(self.options, self.programs, tracker).arguments()

    def _export(self, rest: str) -> list[str]:
        client = shlex.quote(str(CLIENT))
        return [
            "bash",
            "-ec",
            f"set -o pipefail; id=$({client} create {image.NAME} true)\n"
            f"{client} export $id {rest}\n{client} rm $id >/dev/null",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small image, for trying")
    parser.add_argument("--no-reference", action="store_true", help="leave out what is run once")
    parser.add_argument("--output", type=Path, metavar="DIR", help="[default: benchmarks/results]")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error("--runs must be at least 1")
    output = given.output or (None if given.small else RESULTS)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = measure(given.runs, small=given.small, references=not given.no_reference)
    except SqshforgeError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    show(result)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "pack.json").write_text(json.dumps(result, indent=2) + "\n")
        draw(result, output / "pack.png")
    return 0 if all(bar["met"] for bar in result["bars"]) else 1


def measure(runs: int, *, small: bool, references: bool) -> dict[str, Any]:
    """Set everything up, run the rounds, and leave nothing behind but the base's archive."""
    programs, reporter = Programs(), Reporter()
    if os.geteuid() != 0:
        raise MissingError("this benchmark mounts a daemon's layers", mend="run it as root")
    for program in ("setpriv", "mksquashfs", "mount", "umount"):
        programs.require(program)
    require_space(Path(tempfile.gettempdir()), int(1e9 if small else 8e9), "this benchmark")
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(daemon())
        socket = Path(host.removeprefix("unix://"))
        socket.parent.chmod(0o711)  # the socket's group may reach it
        os.environ["DOCKER_HOST"] = host
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix="sqshforge-bench-"))
        folder = Path(work)
        folder.chmod(0o711)
        bench = image.prepare(ROOT, folder, programs, reporter, small=small)
        bench.build(image.NAME)
        rig = Rig(folder, bench, socket, programs)
        _expect_user(rig, socket.parent / "d")
        tree = stack.enter_context(rig.mounted())
        facts = {"packages": [] if small else image.PACKAGES, **_facts(tree, rig)}
        reflink = stack.enter_context(rig.reflinks())
        if not reflink:
            reporter.say("mkfs.xfs is not installed (xfsprogs): no row with reflinks")
        for name in ("warm", *(["reflink"] if reflink else [])):
            rig.warm(name)
        rows = rig.rows(reflink=reflink)
        took: dict[str, list[float]] = {row.name: [] for row in rows}
        for number in range(runs + 1):
            for row in rows:
                seconds = _timed(row, programs)
                reporter.say(f"round {number}: {row.name}: {seconds:.2f} s")
                if number:  # the first one warms up
                    took[row.name].append(seconds)
        facts["sqsh_bytes"] = (folder / "root" / "out.sqsh").stat().st_size
        once = {row.name: _timed(row, programs) for row in (rig.references() if references else [])}
        peak = _peak(rig.cold_mounted(), socket.parent / "d" / "overlay2", programs)
    medians = {name: statistics.median(values) for name, values in took.items()}
    return {
        "what": "packing one image, whole commands, seconds; page cache warm, rows interleaved",
        "image": facts,
        "rows": [
            {
                "name": row.name,
                "what": row.what,
                "seconds": took[row.name],
                "median": round(medians[row.name], 3),
            }
            for row in rows
        ],
        "bars": [bar.result(medians) for bar in BARS if bar.row in medians],
        "reference": once,
        "peak": {"row": "cold, mounted", **peak},
        "machine": _machine(rig.options.jobs),
        "tools": _tools(programs),
    }


def _timed(row: Row, programs: Programs) -> float:
    """How long a row's command takes, with nothing left to be written from what was before."""
    row.before()
    os.sync()
    started = time.monotonic()
    _run(row.argv, row.env, programs)
    return round(time.monotonic() - started, 3)


def _run(
    argv: Sequence[str | Path],
    env: Mapping[str, str],
    programs: Programs,
    watch: Callable[[int], None] = lambda pid: None,
) -> None:
    with tempfile.TemporaryFile() as said:
        with programs.start(
            argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env
        ) as process:
            watch(process.pid)
            code = process.wait()
        if code != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            raise failed([str(word) for word in argv], code, lines)


def _peak(row: Row, layers: Path, programs: Programs) -> dict[str, int]:
    """What a command takes at most of memory and disk, in a run that is not timed.

    Disk is what there is beyond the output and the cache: temporary files, whatever lies beside
    the output, and new layers of the daemon.
    """
    row.before()
    cache, place = Path(row.env["SQSHFORGE_CACHE"]), Path(row.env["TMPDIR"])
    known = set(layers.iterdir())

    def disk() -> int:
        new = (path for path in layers.iterdir() if path not in known)
        return footprint.size(place, without=cache) + sum(map(footprint.size, new))

    with contextlib.ExitStack() as stack:
        peaks: list[footprint.Peak] = []

        def watch(pid: int) -> None:
            peaks.append(stack.enter_context(footprint.watched(pid, disk)))

        _run(row.argv, row.env, programs, watch)
    return {
        "peak_memory_bytes": peaks[0].memory,
        "peak_extra_disk_bytes": max(0, peaks[0].disk - footprint.size(place, without=cache)),
        "cache_bytes": footprint.size(cache),
    }


def _expect_user(rig: Rig, data: Path) -> None:
    """See that the ordinary user can do what the row needs, and not more than that."""
    if rig.group == 0:
        raise MissingError("there is no group docker", mend="apt-get install docker.io")
    code = f"import os, sys, sqshforge.cli; sys.exit(os.access({str(data)!r}, os.X_OK))"
    asked = rig.programs.attempt([*rig.as_user(), sys.executable, "-c", code])
    if asked.code != 0:
        raise WorkError(
            "an ordinary user cannot run sqshforge here, or can read docker's layers",
            where=asked.err.strip().rpartition("\n")[2] or str(data),
            mend="put the checkout and its .venv where every user can read them",
        )
    rig.programs.capture([*rig.as_user(), CLIENT, "version"], env={"HOME": str(rig.folder)})


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _facts(tree: Path, rig: Rig) -> dict[str, Any]:
    """How large the image is. Reading it all brings it to the page cache, too."""
    entries = bytes_ = 0
    seen = set()
    for folder, folders, files in os.walk(tree):
        entries += len(folders) + len(files)
        for name in files:
            path = Path(folder, name)
            found = path.lstat()
            if path.is_file() and not path.is_symlink() and found.st_ino not in seen:
                seen.add(found.st_ino)
                bytes_ += found.st_size
                with path.open("rb") as file:
                    while file.read(1 << 20):
                        pass
    asked = rig.programs.capture([CLIENT, "image", "inspect", image.NAME])
    return {
        "bytes": bytes_,
        "entries": entries,
        "layers": len(json.loads(asked)[0]["RootFS"]["Layers"]),
        "profile": PROFILE,
    }


def _machine(jobs: int) -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "processors": jobs,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
    }


def _tools(programs: Programs) -> dict[str, str]:
    asked: dict[str, list[str | Path]] = {
        "mksquashfs": ["mksquashfs", "-version"],
        "docker": [CLIENT, "--version"],
        "tar2sqfs": ["tar2sqfs", "--version"],
    }
    found = {
        name: programs.attempt(argv).out.partition("\n")[0]
        for name, argv in asked.items()
        if programs.which(str(argv[0]))
    }
    return {**found, "python": platform.python_version()}


def show(result: Mapping[str, Any]) -> None:
    """Print all as a table."""
    bars = {bar["row"]: bar for bar in result["bars"]}
    table = Table("row", "median s", "ratio", "goal", "")
    for row in result["rows"]:
        bar = bars.get(row["name"])
        words = ["", "", ""]
        if bar is not None:
            words = [f"{bar['ratio']:.2f}", bar["goal"], "met" if bar["met"] else "MISSED"]
        table.add_row(row["name"], f"{row['median']:.2f}", *words)
    for name, seconds in result["reference"].items():
        table.add_row(name, f"{seconds:.2f}", "", "", "once")
    show_table(table)
    facts, peak = result["image"], result["peak"]
    print(
        f"image: {human(facts['bytes'])} in {facts['entries']} entries, "
        f"packed {human(facts['sqsh_bytes'])}\n"
        f"cold, mounted: at most {human(peak['peak_memory_bytes'])} of memory, "
        f"{human(peak['peak_extra_disk_bytes'])} of disk beyond output and cache; "
        f"the cache takes {human(peak['cache_bytes'])}"
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the medians with their goals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    medians = {row["name"]: row["median"] for row in result["rows"]}
    once = {f"{name} (once)": seconds for name, seconds in result["reference"].items()}
    values = {**medians, **once}
    met = {bar["row"]: bar["met"] for bar in result["bars"]}
    colors = [
        "#b0b7c3" if name not in met else "#2f7d5b" if met[name] else "#b5443a" for name in values
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(values) + 1.4))
    places = range(len(values))
    axes.barh(places, list(values.values()), color=colors, height=0.62)
    axes.set_yticks(places, list(values))
    axes.invert_yaxis()
    goals = {bar.row: bar.seconds(medians) for bar in BARS if bar.row in medians}
    for place, (name, seconds) in enumerate(values.items()):
        if name in goals:
            axes.plot([goals[name]] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
        end = max(seconds, goals.get(name, 0))
        axes.annotate(
            f"{seconds:.2f} s",
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.margins(x=0.12)
    axes.set_xlabel("seconds, whole command, median (less is better; the black line is the goal)")
    facts = result["image"]
    axes.set_title(
        f"Packing an image of {human(facts['bytes'])}, {facts['entries']} entries, "
        f"on {result['machine']['processors']} processors",
        loc="left",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
