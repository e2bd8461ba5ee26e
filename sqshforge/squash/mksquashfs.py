"""The calls of mksquashfs: to squash a folder in place, a tar stream, and to append a folder.

An image is written in two steps: first everything except /sqshforge, then /sqshforge is appended.
So the first part, which takes most of the time, can be reused while the training code changes.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqshforge.doctor import mksquashfs
from sqshforge.errors import MissingError, RequestError
from sqshforge.host import resources
from sqshforge.host.programs import Programs, failed
from sqshforge.host.syscalls import begin_writing
from sqshforge.host.terminal import Tracker
from sqshforge.hot import NONE, HotList
from sqshforge.image.address import Stream
from sqshforge.image.overlay import Stack
from sqshforge.squash import folder_tar
from sqshforge.squashfs.superblock import set_duplicates

LEFT_OUT = ("dev/*", ".dockerenv")

# Settings for glibc. mksquashfs has buffers of a megabyte each; by default glibc gets each from the
# kernel and gives it back, with a page fault for every 4 KiB, which takes a tenth of the time
# (measured, docs/background/performance.md).
ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# For folders: blocks of zeros are stored like other blocks. If they were left out, a file's inode
# would depend on how many blocks the file takes on this disk. Not for a tar, whose inodes do not,
# and for which -no-sparse makes mksquashfs (seen in 4.5.1; 4.5 to 4.7 have the same lines) exit, or
# worse, on empty files: it returns a buffer of theirs to a cache in which it was never entered.
FOLDER = ("-no-sparse",)
# zstd level and block size; docs/background/performance.md has the measurements behind them.
PROFILES = {"fast": (1, "128K"), "shared": (3, "1M"), "archive": (15, "1M")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to pack. `jobs`, `force` and `keep` do not change the bytes.

    `hot` lists the files that come first; with `xattrs` there are none. With `keep`, a file of the
    same image stays as it is, whatever other options it was packed with.
    """

    level: int
    block: str
    jobs: int
    force: bool = False
    keep: bool = False
    xattrs: bool = False
    devices: bool = False
    hot: HotList = NONE

    @classmethod
    def of(
        cls,
        profile: str,
        *,
        jobs: int | None = None,
        force: bool = False,
        keep: bool = False,
        xattrs: bool = False,
        devices: bool = False,
        hot: HotList = NONE,
    ) -> Options:
        """Make the options of a named profile; raises `RequestError` for an unknown name.

        By default all processors that this process may use are used: in a Slurm job or a cgroup,
        those of the job.
        """
        if profile not in PROFILES:
            raise RequestError(
                f"unknown profile {profile!r}", fix=f"profiles are: {', '.join(PROFILES)}"
            )
        level, block = PROFILES[profile]
        return cls(
            level=level,
            block=block,
            jobs=jobs or resources.processors(),
            force=force,
            keep=keep,
            xattrs=xattrs,
            devices=devices,
            hot=hot,
        )


def version(program: Path, programs: Programs) -> str:
    """The tool and its version: another version may write other bytes for the same tree.

    Raises `MissingError` for a version that may write corrupt files.
    """
    said = programs.attempt([program, "-version"]).out.partition("\n")[0]
    wrong = mksquashfs.fault(said)
    if wrong:
        raise MissingError(wrong, where=str(program), fix=mksquashfs.FIX)
    return said


@dataclass(frozen=True)
class Squasher:
    """Mksquashfs with the options of one pack.

    In all methods, `epoch` is the newest time in the written file, in seconds since 1970. All raise
    `WorkError` with mksquashfs's message if it fails.
    """

    options: Options
    programs: Programs
    tracker: Tracker

    def folder(self, root: Path, target: Path, epoch: int) -> None:
        """Squash a folder in place, which keeps extended attributes.

        Mksquashfs itself leaves out what enroot leaves out, and widens modes as enroot does.
        """
        argv: list[str | Path] = ["mksquashfs", ".", target, "-noappend"]
        argv += [*self.arguments(), *FOLDER, *self._actions()]
        argv += ["-wildcards", "-e", *LEFT_OUT]
        with self._running(argv, epoch, cwd=root, env=ALLOCATION) as process:
            self._follow(process, target)

    def stack(
        self, stack: Stack, target: Path, epoch: int, hot: HotList, *, split: bool
    ) -> list[bytes]:
        """Squash layers, the files of the list `hot` first; return those files.

        The layers go through a pipe as one tar, so the result has the same bytes as that of an
        archive of the image. With its own -sort, mksquashfs before 4.7 orders the inodes
        differently. With `split`, /sqshforge is left out.
        """
        argv: list[str | Path] = ["mksquashfs", "-", target, "-tar", "-noappend"]
        argv += self.arguments()
        first: list[bytes] = []
        merged = stack.merge()
        with self._running(argv, epoch, stdin=subprocess.PIPE, env=ALLOCATION) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # mksquashfs failed and reports why
                first = folder_tar.write(
                    process.stdin,
                    merged,
                    hot,
                    self._passed(target),
                    split=split,
                    devices=self.options.devices,
                    layers=stack.layers,
                )
                process.stdin.close()
            stack.unmerge()
            self._follow(process, target)
        return first

    def tar(
        self,
        content: Stream,
        files: Mapping[str, bytes],
        target: Path,
        epoch: int,
        hot: HotList,
        *,
        split: bool,
    ) -> list[bytes]:
        """Squash a tar stream, the files of the list `hot` first; return those files."""
        first: list[bytes] = []
        argv: list[str | Path] = ["mksquashfs", "-", target, "-tar", "-noappend"]
        argv += self.arguments()
        with self._running(argv, epoch, stdin=subprocess.PIPE, env=ALLOCATION) as process:
            assert process.stdin is not None
            # Mksquashfs stops reading at the tar's end mark, or when it fails, with a message.
            with contextlib.suppress(BrokenPipeError):
                first = content.write_base(
                    process.stdin,
                    files,
                    epoch,
                    self.tracker.advance,
                    split=split,
                    xattrs=self.options.xattrs,
                    devices=self.options.devices,
                    hot=hot,
                )
                process.stdin.close()
        return first

    def append(self, payload: Path, target: Path, epoch: int) -> None:
        """Append a folder, under its own name, to a squash file that has no entry of that name.

        The file's content is not searched for duplicates: mksquashfs would unpack it again for
        every appended file whose size occurs there, which takes longer than the rest and finds
        little.
        """
        argv: list[str | Path] = ["mksquashfs", payload.name, target]
        argv += ["-keep-as-directory", "-no-recovery"]
        argv += [*self.arguments(), *FOLDER, *self._actions()]
        set_duplicates(target, False)
        with self._running(argv, epoch, cwd=payload.parent) as process:
            process.wait()
        set_duplicates(target, True)

    def arguments(self) -> list[str]:
        """The arguments of every call.

        Mksquashfs packs the tail ends of a tar's files together whatever the options say, so a
        folder's are packed together too.
        """
        options = self.options
        words = ["-all-root", "-exports", "-exit-on-error", "-no-progress", "-always-use-fragments"]
        words += ["-xattrs" if options.xattrs else "-no-xattrs"]
        words += ["-comp", "zstd", "-Xcompression-level", str(options.level), "-b", options.block]
        words += ["-processors", str(options.jobs), "-root-mode", "755"]
        return [*words, "-mem", resources.mksquashfs_memory(resources.memory())]

    def _actions(self) -> list[str]:
        """The arguments that change or leave out a folder's entries as they are read."""
        actions = ["chmod(u+r)@type(f)", "chmod(u+rwx)@type(d)", "exclude@type(s)"]
        if not self.options.devices:
            actions.append("exclude@type(b)||type(c)")
        return [word for one in actions for word in ("-action", one)]

    @contextlib.contextmanager
    def _running(
        self,
        argv: list[str | Path],
        epoch: int,
        *,
        stdin: int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run mksquashfs for the length of a block.

        It runs in the folder that it reads (`cwd`), because it opens each file by its whole path,
        and a path through another process's root is slow to resolve. SOURCE_DATE_EPOCH sets the
        epoch, because mksquashfs refuses -mkfs-time and -all-time together with that variable.
        """
        # host/resources.py parses the messages, so they must be in one language.
        environment = {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C", **(env or {})}
        with tempfile.TemporaryFile() as said:
            with self.programs.start(
                argv, stdin=stdin, stdout=said, stderr=said, env=environment, cwd=cwd
            ) as process:
                yield process
                code = process.wait()
            if code != 0:
                said.seek(0)
                lines = said.read().decode(errors="replace").splitlines()
                raise failed([str(word) for word in argv], code, lines)

    def _passed(self, target: Path) -> Callable[[int], None]:
        """Return a callback that reports progress and starts writeback, as `_follow` does.

        It is called with the count of bytes written to mksquashfs.
        """
        began = time.monotonic()

        def passed(count: int) -> None:
            nonlocal began
            self.tracker.advance(count)
            if time.monotonic() > began + 0.2:
                began = time.monotonic()
                _begin_writing(target)

        return passed

    def _follow(self, process: subprocess.Popen[bytes], target: Path) -> None:
        """Report mksquashfs's progress by the bytes it has read, and start writing its output out.

        Without a terminal its own progress bar is hardly drawn. On its own the kernel would begin
        to write seconds later, and the final sync would wait for all of it.
        """
        # Popen.wait with a timeout polls, and returns up to 50 ms late.
        ended = os.pidfd_open(process.pid)
        try:
            while not select.select([ended], [], [], 0.2)[0]:
                self.tracker.set(_bytes_read(process.pid))
                _begin_writing(target)
        finally:
            os.close(ended)


def _begin_writing(target: Path) -> None:
    with contextlib.suppress(OSError), target.open("rb") as written:
        begin_writing(written.fileno())


def _bytes_read(pid: int) -> int:
    try:
        counts = Path(f"/proc/{pid}/io").read_text()
    except OSError:  # it has just ended
        return 0
    return int(counts.partition("rchar: ")[2].partition("\n")[0] or 0)
