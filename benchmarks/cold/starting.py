"""One start of a squash file until its first step has ended, and the same without a container."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cold.served import Request, Served, read_log
from benchmarks.options import ROOT
from sqshforge.errors import MissingError, WorkError
from sqshforge.host.programs import Programs, failed
from sqshforge.run import trace, warm
from tests.support import containers

# What mounts the file, and whether that is by FUSE.
READERS = {"kernel": False, "squashfuse": True, "squashfuse_ll": True}
FIRST = "the first of this start"  # what the training code says of the first step when it has ended
SOURCES = "/sqshforge/training"
RUNS, OWN = "/tmp/trace", "@RUN@"  # where the traced start saves, and one without a container
LONGEST = 600.0  # seconds of a start
VERSION = re.compile(r"\d+\.\d+")
LAST = 12  # lines of a failed start that its error shows


@dataclass(frozen=True)
class Command:
    """What is started: in the container, and without one."""

    inside: tuple[str, ...]
    outside: tuple[str, ...]

    @classmethod
    def of(cls, file: Path) -> Command:
        """The first steps of training, as they are traced; outside by this very Python."""
        inside = trace.default_command(file)
        words = {"python3": sys.executable}
        outside = (
            words.get(one, one).replace(SOURCES, str(ROOT / "training")).replace(RUNS, OWN)
            for one in inside
        )
        return cls(inside, tuple(outside))

    @classmethod
    def small(cls, place: Path) -> Command:
        """Reading a tenth of the small run's files."""
        line = f"cat /usr/data/*5 > /dev/null; echo {FIRST}"
        return cls(("sh", "-c", line), ("sh", "-c", line.replace("/usr", f"{place}/tree/usr")))


@dataclass(frozen=True)
class Started:
    """What a start took until its first step had ended, and what it asked of the server."""

    seconds: float
    requests: list[Request]


def usable() -> list[str]:
    """The readers that this machine has, for this user."""
    programs = Programs()
    has_kernel = os.geteuid() == 0 and "\tsquashfs\n" in Path("/proc/filesystems").read_text()
    return [name for name in READERS if (has_kernel if name == "kernel" else programs.which(name))]


def readers(asked: Sequence[str] | None) -> list[str]:
    """The readers that are asked for, or all that this machine has for this user.

    Raises `MissingError` for one that it does not have, and where it has none.
    """
    there = usable()
    for name in asked or ():
        if name == "kernel" and name not in there:
            raise MissingError(
                "--reader kernel: the kernel mounts squash files for root alone, "
                "and /proc/filesystems must list squashfs",
                fix="run it as root, after `modprobe squashfs`; or name another --reader",
            )
        if name not in there:
            Programs().require(name, f"--reader {name}")
    if not there:
        raise MissingError(
            "nothing here mounts a squash file: the kernel does for root alone",
            fix="apt-get install squashfuse, or run it as root",
        )
    return list(asked or there)


def start(behind: Served, reader: str, command: Command, *, is_warm: bool) -> Started:
    """Start a served file by our own runtime; `WorkError` where that fails."""
    begin = behind.log.stat().st_size
    argv = containers.argv_by(behind.path, *command.inside, fuse=READERS[reader])
    with _mounting_by(reader) as environment:
        environment[warm.VARIABLE] = str(int(is_warm))
        seconds, end = until_first(argv, environment, lambda: behind.log.stat().st_size)
    return Started(seconds, read_log(behind.log.read_bytes()[begin:end].decode()))


def read_range(path: Path) -> float:
    """Seconds of reading a file's hot range from front to back, as a start reads it ahead."""
    since = time.monotonic()
    warm.warm(path, goes_on=lambda: True)
    return time.monotonic() - since


def bare(command: Command) -> float:
    """Seconds until the first step has ended, without a container."""
    with tempfile.TemporaryDirectory(prefix="sqshforge-bare-") as own:  # else it would resume
        argv = [one.replace(OWN, own) for one in command.outside]
        return until_first(argv, {"PYTHONPATH": str(ROOT)})[0]


def until_first(
    argv: Sequence[str], environment: Mapping[str, str], look: Callable[[], int] = lambda: 0
) -> tuple[float, int]:
    """Run a start to its end: seconds until its first step had ended, and what `look` gave then.

    Raises `WorkError` where it fails, takes too long or has no first step.
    """
    last: deque[str] = deque(maxlen=LAST)
    since, found = time.monotonic(), None
    with Programs().start(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    ) as process:
        assert process.stdout is not None
        watch = threading.Timer(LONGEST, process.kill)
        watch.start()
        try:
            for line in process.stdout:
                if found is None and FIRST.encode() in line:
                    found = time.monotonic() - since, look()
                last.append(line.decode(errors="replace").rstrip())
            code = process.wait()
        finally:
            watch.cancel()
    if code != 0:
        raise failed(argv, code, list(last))
    if found is None:
        raise WorkError("the start has said nothing of a first step", where=" ".join(argv))
    return found


@contextlib.contextmanager
def _mounting_by(reader: str) -> Iterator[dict[str, str]]:
    """An environment in which our runtime takes this reader: of two it takes squashfuse_ll."""
    if reader != "squashfuse":
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="sqshforge-reader-") as folder:
        Path(folder, "squashfuse_ll").symlink_to(Programs().require("squashfuse"))
        yield {"PATH": f"{folder}:{os.environ['PATH']}"}


def tools(programs: Programs) -> dict[str, str]:
    """The versions of what takes part."""
    asked = {
        "mksquashfs": ("mksquashfs", "-version"),
        "nbdkit": ("nbdkit", "--version"),
        "nbdfuse": ("nbdfuse", "--version"),
        "squashfuse": ("squashfuse",),
        "squashfuse_ll": ("squashfuse_ll",),
    }
    found = {}
    for name, argv in asked.items():
        if programs.which(name):
            said = programs.attempt(argv)
            lines = f"{said.out}\n{said.err}".splitlines()
            found[name] = next((line for line in lines if VERSION.search(line)), "unknown")
    return found
