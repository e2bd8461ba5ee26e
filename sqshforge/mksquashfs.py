"""The two ways to call mksquashfs: on a folder where it lies, and on a tar as it comes.

What enroot changes of an image's tree is done on the way, so both give the same tree.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqshforge import tarfilter
from sqshforge.errors import RequestError
from sqshforge.programs import Programs, failed
from sqshforge.progress import Tracker
from sqshforge.source import Folder, Stream

MEMORY = "768M"

# zstd level and block size; docs/performance.md has the figures behind the choice.
PROFILES = {"fast": (1, "128K"), "shared": (3, "1M"), "archive": (15, "1M")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to pack. `jobs` and `force` change nothing of the bytes."""

    level: int
    block: str
    jobs: int
    force: bool = False

    @classmethod
    def of(cls, profile: str, *, jobs: int | None = None, force: bool = False) -> Options:
        """The options of a named profile; `RequestError` for a name that is none.

        By default all processors that this process may use are used, which in a Slurm job or a
        cgroup's set of processors are those of the job.
        """
        if profile not in PROFILES:
            raise RequestError(
                f"unknown profile {profile!r}", mend=f"profiles are: {', '.join(PROFILES)}"
            )
        level, block = PROFILES[profile]
        return cls(level=level, block=block, jobs=jobs or len(os.sched_getaffinity(0)), force=force)


def version(program: Path, programs: Programs) -> str:
    """The tool and its version: another one may lay the same tree out in other bytes."""
    return programs.attempt([program, "-version"]).out.partition("\n")[0]


def _arguments(options: Options) -> list[str]:
    words = ["-noappend", "-all-root", "-no-xattrs", "-exports", "-exit-on-error"]
    words += ["-comp", "zstd", "-Xcompression-level", str(options.level), "-b", options.block]
    return [*words, "-processors", str(options.jobs), "-mem", MEMORY, "-root-mode", "755"]


def from_folder(
    content: Folder,
    files: dict[str, bytes],
    partial: Path,
    options: Options,
    epoch: int,
    programs: Programs,
    tracker: Tracker,
) -> None:
    """Squash a folder in place: what enroot changes is done by mksquashfs as it reads."""
    # Beside the output: what a killed packer leaves is found by the next one.
    folder = partial.with_name(f"{partial.name}.files")
    folder.mkdir()
    try:
        lines = []
        for index, (name, data) in enumerate(sorted(files.items())):
            (folder / str(index)).write_bytes(data)
            command = f"cat {shlex.quote(str(folder / str(index)))}"
            lines.append(f'"{name}" F {epoch} 644 0 0 {command}\n')
        if not (content.path / "etc").is_dir():
            lines.insert(0, f"etc D {epoch} 755 0 0\n")
        (folder / "pseudo").write_text("".join(lines))
        argv: list[str | Path] = ["mksquashfs", content.path, partial]
        argv += [*_arguments(options), "-no-progress"]
        argv += ["-action", "chmod(u+r)@type(f)", "-action", "chmod(u+rwx)@type(d)"]
        argv += ["-pf", folder / "pseudo", "-wildcards", "-e", *tarfilter.LEFT_OUT, *sorted(files)]
        with _running(argv, epoch, programs) as process:
            while process.poll() is None:
                tracker.set(_bytes_read(process.pid))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
    finally:
        shutil.rmtree(folder)


def from_tar(
    content: Stream,
    files: dict[str, bytes],
    partial: Path,
    options: Options,
    epoch: int,
    programs: Programs,
    tracker: Tracker,
) -> None:
    """Send a tar through the filter into mksquashfs."""
    argv: list[str | Path] = ["mksquashfs", "-", partial, "-tar"]
    argv += [*_arguments(options), "-no-progress"]
    with _running(argv, epoch, programs, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        # It stops reading at the tar's end mark, or earlier where it fails: then it says why.
        with contextlib.suppress(BrokenPipeError):
            tarfilter.copy(content.tar, process.stdin, files, epoch, tracker.advance)
            process.stdin.close()


@contextlib.contextmanager
def _running(
    argv: list[str | Path], epoch: int, programs: Programs, stdin: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Mksquashfs for the length of a block; `WorkError` with its own words where it fails.

    The epoch goes by the variable, and not by -mkfs-time or -all-time: both at once it refuses.
    """
    environment = {"SOURCE_DATE_EPOCH": str(epoch)}
    with tempfile.TemporaryFile() as said:
        with programs.start(
            argv, stdin=stdin, stdout=said, stderr=said, env=environment
        ) as process:
            yield process
            code = process.wait()
        if code != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            raise failed([str(word) for word in argv], code, lines)


def _bytes_read(pid: int) -> int:
    """What a process has read so far: the measure of its progress through the image's files.

    Its own progress bar is hardly drawn where there is no terminal.
    """
    try:
        counts = Path(f"/proc/{pid}/io").read_text()
    except OSError:  # it has just ended
        return 0
    return int(counts.partition("rchar: ")[2].partition("\n")[0] or 0)
