"""The image in a daemon of its own, and the packing commands to be timed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import image
from sqshforge.errors import MissingError, WorkError
from sqshforge.host.programs import Programs, failed
from sqshforge.host.terminal import Tracker
from sqshforge.squash.mksquashfs import PROFILES, Options, Squasher
from tests.support import resource_usage
from tests.support.engines import CLIENT

NOBODY = 65534
PROFILE = "shared"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A command to be timed, and an untimed preparation that runs before it."""

    name: str
    what: str
    argv: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None


class Rig:
    """The image in its daemon, and the commands that pack it, in a temporary folder."""

    def __init__(self, folder: Path, bench: image.Bench, socket: Path, programs: Programs) -> None:
        self.folder = folder
        self.bench = bench
        self.programs = programs
        self.built = ""
        self.edits = 0
        self.group = socket.stat().st_gid
        self.options = Options.of(PROFILE)
        for name in ("mount", "floor", "root", "user", "edits", "warm", "reflink", "tree"):
            (folder / name).mkdir()
        for name in ("user", "edits"):
            os.chown(folder / name, NOBODY, NOBODY)

    def rows(self, *, reflink: bool) -> list[Row]:
        floor: list[str | Path] = [
            "mksquashfs",
            self.folder / "mount",
            self.folder / "floor" / "out.sqsh",
        ]
        edited = f"dockerd://{image.EDITED}"
        again = self._pack(edited, "warm")
        shared = Row(
            name="after an edit, reflink",
            what="the same where a copy shares its blocks: output and cache on XFS",
            argv=self._pack(edited, "reflink"),
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
                name="save",
                what="docker save to /dev/null",
                argv=["bash", "-ec", f"{shlex.quote(str(CLIENT))} save {image.NAME} >/dev/null"],
            ),
            Row(
                name="cold, saved",
                what="pack by a user of docker, nothing cached",
                argv=self._by_user(f"dockerd://{image.NAME}", "user"),
                env=self._places("user"),
                before=lambda: _empty(self.folder / "user"),
            ),
            Row(
                name="after an edit, by a user",
                what="pack by a user of docker after an edit of one file of training/",
                argv=self._by_user(edited, "edits"),
                env=self._places("edits"),
                before=self._edit,
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
                before=lambda: self._pack_edited(again),
            ),
            *([shared] if reflink else []),
        ]

    def cold_mounted(self) -> Row:
        return Row(
            name="cold, mounted",
            what="pack by root, nothing cached",
            argv=self._pack(f"dockerd://{image.NAME}", "root"),
            env=self._places("root"),
            before=lambda: _empty(self.folder / "root"),
        )

    def _by_user(self, source: str, place: str) -> list[str | Path]:
        return [*self.as_user(), *self._pack(source, place)]

    def references(self) -> list[Row]:
        """Rows of what could be done by hand; pack itself also syncs its output to the disk."""
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
        """Pack the image once to fill the cache that a cached row uses."""
        pack = self._by_user if name == "edits" else self._pack
        run(pack(f"dockerd://{image.NAME}", name), self._places(name), self.programs)

    def as_user(self) -> list[str]:
        """The words that run a command as an ordinary user who may use docker."""
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", f"--groups={self.group}"]
        return [*words, "--inh-caps=-all"]

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount the image's layers read-only where the row `floor` expects them."""
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
        """Mount a file system with reflinks for its row; yields False if none can be made."""
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

    def _pack_edited(self, argv: Sequence[str | Path]) -> None:
        if not self.built:
            self._edit()
        run(argv, self._places("warm"), self.programs)

    def _pack(self, source: str, place: str) -> list[str | Path]:
        output = self.folder / place / "out.sqsh"
        words: list[str | Path] = [sys.executable, "-m", "sqshforge", "pack", source]
        return [*words, "-o", output, "--profile", PROFILE]

    def _places(self, name: str) -> dict[str, str]:
        """Environment variables that put the home, cache and temporary folder beside an output."""
        folder = str(self.folder / name)
        return {"HOME": folder, "SQSHFORGE_CACHE": f"{folder}/cache", "TMPDIR": folder}

    def _squash_words(self) -> list[str]:
        """The mksquashfs options that pack itself uses, so that the rows differ in nothing else."""
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


def timed(row: Row, programs: Programs) -> float:
    """Time a row's command in seconds, after everything written before it has been synced."""
    row.before()
    os.sync()
    started = time.monotonic()
    run(row.argv, row.env, programs)
    return round(time.monotonic() - started, 3)


def run(
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


def peak(row: Row, layers: Path, programs: Programs) -> dict[str, int]:
    """Measure a command's peak use of memory and disk, in an untimed run.

    Disk is what exists beyond the output and the cache: temporary files, whatever lies beside the
    output, and new layers of the daemon.
    """
    row.before()
    cache, place = Path(row.env["SQSHFORGE_CACHE"]), Path(row.env["TMPDIR"])
    known = set(layers.iterdir())

    def disk() -> int:
        new = (path for path in layers.iterdir() if path not in known)
        return resource_usage.size(place, without=cache) + sum(map(resource_usage.size, new))

    with contextlib.ExitStack() as stack:
        peaks: list[resource_usage.Peak] = []

        def watch(pid: int) -> None:
            peaks.append(stack.enter_context(resource_usage.watched(pid, disk)))

        run(row.argv, row.env, programs, watch)
    return {
        "peak_memory_bytes": peaks[0].memory,
        "peak_extra_disk_bytes": max(0, peaks[0].disk - resource_usage.size(place, without=cache)),
        "cache_bytes": resource_usage.size(cache),
    }


def expect_user(rig: Rig, data: Path) -> None:
    """Check that the ordinary user can do what the row needs, and no more than that."""
    if rig.group == 0:
        raise MissingError("there is no group docker", fix="apt-get install docker.io")
    code = f"import os, sys, sqshforge.cli.main; sys.exit(os.access({str(data)!r}, os.X_OK))"
    asked = rig.programs.attempt([*rig.as_user(), sys.executable, "-c", code])
    if asked.code != 0:
        raise WorkError(
            "an ordinary user cannot run sqshforge here, or can read docker's layers",
            where=asked.err.strip().rpartition("\n")[2] or str(data),
            fix="put the checkout and its .venv where every user can read them",
        )
    rig.programs.capture([*rig.as_user(), CLIENT, "version"], env={"HOME": str(rig.folder)})


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def facts(tree: Path, rig: Rig) -> dict[str, Any]:
    """Return the size of the image. Reading all of it also brings it into the page cache."""
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
