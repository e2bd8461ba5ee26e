"""A file behind a server that adds a latency to each request and logs it.

nbdkit serves the file, with its filters `delay` and `log`. nbdfuse makes a file of what is served,
which a start mounts: the kernel caches it and reads ahead in it, as in a file of a shared file
system. A new server's file has no page in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs

READ = re.compile(
    r"(?P<at>\d+-\d+-\d+ [\d:.]+) connection=\d+ Read id=\d+ "
    r"offset=(?P<offset>0x[0-9a-f]+) count=(?P<length>0x[0-9a-f]+)"
)
NAME = "image.sqsh"
PAGE = 4096  # bytes that the kernel keeps at least
TIMEOUT = 30.0  # seconds until a server must be up, or its file unmounted
HELP = {"nbdkit": "it serves a file with a latency", "nbdfuse": "it makes a file of what is served"}


@dataclass(frozen=True)
class Request:
    """A read that the server was asked for: when (seconds of the epoch), where, and how much."""

    at: float
    offset: int
    length: int


@dataclass(frozen=True)
class Served:
    """The file as a start finds it, and what was asked of its server."""

    path: Path
    log: Path

    def requests(self) -> list[Request]:
        """All reads so far, in order."""
        return read_log(self.log.read_text())


def read_log(text: str) -> list[Request]:
    """The reads in what nbdkit's filter `log` wrote."""
    return [
        Request(
            datetime.fromisoformat(found["at"]).replace(tzinfo=timezone.utc).timestamp(),
            int(found["offset"], 16),
            int(found["length"], 16),
        )
        for found in map(READ.match, text.splitlines())
        if found
    ]


def distinct(requests: list[Request]) -> list[Request]:
    """The requests for pages that no earlier one asked for, each cut down to those.

    A node that is short of memory drops pages and asks for them again, which does not count.
    """
    seen: set[int] = set()
    found = []
    for one in requests:
        pages = range(one.offset // PAGE, -(-(one.offset + one.length) // PAGE))
        new = [page for page in pages if page not in seen]
        if new:
            seen.update(new)
            found.append(Request(one.at, new[0] * PAGE, len(new) * PAGE))
    return found


def busiest(requests: list[Request], window: float = 1.0) -> tuple[int, int]:
    """The most bytes, and the most requests, that were asked for within any `window` of seconds."""
    most = count = size = first = 0
    for index, one in enumerate(requests):
        size += one.length
        while one.at - requests[first].at > window:
            size -= requests[first].length
            first += 1
        most, count = max(most, size), max(count, index - first + 1)
    return most, count


def require(programs: Programs) -> None:
    """Raise `MissingError` where what serves a file is not installed."""
    for program, why in HELP.items():
        programs.require(program, why)


@contextlib.contextmanager
def served(file: Path, latency: int, programs: Programs) -> Iterator[Served]:
    """Serve a file with so many milliseconds of latency for the length of a block.

    Raises `WorkError` where the server does not come up, `MissingError` where it is not installed.
    """
    require(programs)
    with tempfile.TemporaryDirectory(prefix="sqshforge-served-") as name:
        folder = Path(name)
        socket, log, point = folder / "socket", folder / "requests", folder / "point"
        point.mkdir()
        argv: list[str | Path] = ["nbdkit", "--foreground", "--readonly", "--unix", socket]
        argv += ["--filter=log", *(["--filter=delay"] if latency else [])]
        argv += ["file", file, f"logfile={log}", *([f"rdelay={latency}ms"] if latency else [])]
        mounting: list[str | Path] = ["nbdfuse", "--readonly", "-o", "kernel_cache"]
        mounting += [point / NAME, "--unix", socket]
        with (
            _up(argv, socket.exists, folder / "server.txt", programs),
            _up(mounting, (point / NAME).exists, folder / "mount.txt", programs),
        ):
            yield Served(point / NAME, log)
            _unmount(point, programs)


@contextlib.contextmanager
def _up(
    argv: list[str | Path], is_up: Callable[[], bool], said: Path, programs: Programs
) -> Iterator[None]:
    with (
        said.open("wb") as out,
        programs.start(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process,
    ):
        deadline = time.monotonic() + TIMEOUT
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise WorkError(
                    f"{argv[0]} does not come up: {said.read_text(errors='replace').strip()}"
                )
            time.sleep(0.01)
        yield


def _unmount(point: Path, programs: Programs) -> None:
    """Let go of the file once the kernel does: a loop device goes a moment after its mount."""
    umount = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    deadline = time.monotonic() + TIMEOUT
    while (done := programs.attempt([*umount, point])).code != 0:
        if time.monotonic() > deadline:
            raise WorkError(f"the file is still in use: {done.err.strip()}", where=str(point))
        time.sleep(0.05)
