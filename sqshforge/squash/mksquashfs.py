"""The calls of mksquashfs: a folder where it lies, a tar as it comes, and one folder more.

An image is written in two steps: first all but /sqshforge, then /sqshforge is appended. The first
part, which takes the time, can so be used again while the training code changes.
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

# Its buffers are of a megabyte each. glibc would get each from the kernel and give it back, with a
# page fault for every 4 KiB: a tenth of the time, measured (docs/background/performance.md).
ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# Where mksquashfs reads a folder. Blocks of zeros are blocks like others: left out, a file would
# have an inode that depends on how many blocks it takes on this disk. Not for a tar, where that is
# not so, and where mksquashfs (seen in 4.5.1; 4.5 to 4.7 have the same lines) with -no-sparse ends
# or worse over empty files: a buffer of theirs goes back to a cache that it was not entered in.
FOLDER = ("-no-sparse",)
# zstd level and block size; docs/background/performance.md has the figures behind the choice.
PROFILES = {"fast": (1, "128K"), "shared": (3, "1M"), "archive": (15, "1M")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to pack. `jobs`, `force` and `keep` change nothing of the bytes.

    `hot` are the files that come first; with `xattrs` there are none. With `keep` a file of the
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
        """The options of a named profile; `RequestError` for a name that is none.

        By default all processors that this process may use are used, which in a Slurm job or a
        cgroup are those of the job.
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
    """The tool and its version: another one may lay the same tree out in other bytes.

    Raises `MissingError` for one that may write corrupt files.
    """
    said = programs.attempt([program, "-version"]).out.partition("\n")[0]
    wrong = mksquashfs.fault(said)
    if wrong:
        raise MissingError(wrong, where=str(program), fix=mksquashfs.FIX)
    return said


@dataclass(frozen=True)
class Squasher:
    """Mksquashfs with the options of one pack; all raise `WorkError` with its words on failure.

    `epoch` is the newest time in what is written, in seconds of the epoch.
    """

    options: Options
    programs: Programs
    tracker: Tracker

    def folder(self, root: Path, target: Path, epoch: int) -> None:
        """Squash a folder in place, which keeps extended attributes.

        What enroot leaves out and the modes it widens is done by mksquashfs as it reads.
        """
        argv: list[str | Path] = ["mksquashfs", ".", target, "-noappend"]
        argv += [*self.arguments(), *FOLDER, *self._actions()]
        argv += ["-wildcards", "-e", *LEFT_OUT]
        with self._running(argv, epoch, cwd=root, env=ALLOCATION) as process:
            self._follow(process, target)

    def stack(
        self, stack: Stack, target: Path, epoch: int, hot: HotList, *, split: bool
    ) -> list[bytes]:
        """Squash layers, the files of the list `hot` first, which are given back.

        They go as one tar through a pipe, and so become the very bytes that an archive of the same
        image does. By its own -sort, mksquashfs before 4.7 lays the inodes out in another order.
        Where /sqshforge is `split` off it is left out.
        """
        argv: list[str | Path] = ["mksquashfs", "-", target, "-tar", "-noappend"]
        argv += self.arguments()
        first: list[bytes] = []
        merged = stack.merge()
        with self._running(argv, epoch, stdin=subprocess.PIPE, env=ALLOCATION) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # then it failed, and says why
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
        """Squash a tar stream as it comes; gives the files of the list `hot`, which come first."""
        first: list[bytes] = []
        argv: list[str | Path] = ["mksquashfs", "-", target, "-tar", "-noappend"]
        argv += self.arguments()
        with self._running(argv, epoch, stdin=subprocess.PIPE, env=ALLOCATION) as process:
            assert process.stdin is not None
            # It stops reading at the tar's end mark, or earlier where it fails: then it says why.
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
        """Append a folder to a squash file that has none of that name, under its own name.

        What the file has is not looked through for the same content: mksquashfs would unpack it
        all over again for every file of a size that is there already, which takes longer than the
        rest, and little would be found.
        """
        argv: list[str | Path] = ["mksquashfs", payload.name, target]
        argv += ["-keep-as-directory", "-no-recovery"]
        argv += [*self.arguments(), *FOLDER, *self._actions()]
        set_duplicates(target, False)
        with self._running(argv, epoch, cwd=payload.parent) as process:
            process.wait()
        set_duplicates(target, True)

    def arguments(self) -> list[str]:
        """The words that every call has.

        A tar's files have their tail ends packed together whatever is said, so a folder's have too.
        """
        options = self.options
        words = ["-all-root", "-exports", "-exit-on-error", "-no-progress", "-always-use-fragments"]
        words += ["-xattrs" if options.xattrs else "-no-xattrs"]
        words += ["-comp", "zstd", "-Xcompression-level", str(options.level), "-b", options.block]
        words += ["-processors", str(options.jobs), "-root-mode", "755"]
        return [*words, "-mem", resources.mksquashfs_memory(resources.memory())]

    def _actions(self) -> list[str]:
        """What is done to a folder's entries as they are read."""
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

        In the folder that it reads (`cwd`), as it names each file by its whole path, and one that
        leads through another process's root is slow to follow. The epoch goes by the variable, and
        not by -mkfs-time or -all-time: both at once it refuses.
        """
        # Its messages are read (host/resources.py), so they are to be in one language.
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
        """The same as bytes go into mksquashfs: what is to be called with their count."""
        began = time.monotonic()

        def passed(count: int) -> None:
            nonlocal began
            self.tracker.advance(count)
            if time.monotonic() > began + 0.2:
                began = time.monotonic()
                _begin_writing(target)

        return passed

    def _follow(self, process: subprocess.Popen[bytes], target: Path) -> None:
        """Show how far mksquashfs is by what it has read, and see its output on to the disk.

        Its own progress bar is hardly drawn where there is no terminal. The kernel by itself would
        begin to write seconds later, and the end would have to wait for all of it.
        """
        # Popen.wait with a timeout sleeps in between, and is up to 50 ms late.
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
