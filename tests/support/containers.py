"""Start containers in tests, and check what they leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import processes

MARK = "SQSHFORGE_TEST"  # in the environment of everything that a test starts
# Values of `fuse`: for an ordinary user, the kernel cannot mount a file.
FUSE = [
    pytest.param(False, id="kernel", marks=pytest.mark.root),
    pytest.param(True, id="squashfuse"),
]


@contextmanager
def watched(images: Path) -> Iterator[None]:
    """Mark everything that the block starts; at its end, none of that may be left."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    try:
        yield
        # The kernel takes down a namespace a moment after its last process.
        until(lambda: not traces(mark, images), 60.0)
        left = traces(mark, images)
    finally:
        processes.kill(processes.having({MARK: mark}))
        del os.environ[MARK]
    assert not left, f"left behind: {left}"


def traces(mark: str, images: Path) -> list[str]:
    """Return processes with this mark, loop devices of images in the folder, and visible mounts."""
    running = [f"process {processes.command(pid)}" for pid in processes.having({MARK: mark})]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    place = f"{tempfile.gettempdir()}/sqshforge-"
    return [
        *running,
        *(f"loop {line}" for line in _loops() if line.startswith(f"{images}/")),
        *(f"mount {line}" for line in mounts if place in line),
    ]


def _loops() -> list[str]:
    """Return the files behind this machine's loop devices; losetup is not on every user's PATH."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # the device may vanish meanwhile
            found.append(path.read_text().strip())
    return found


def until(holds: Callable[[], object], seconds: float = 400.0) -> bool:
    """Wait until something holds; returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def signal_all(number: signal.Signals) -> None:
    """Signal every process of the test's containers, in any session, as Slurm does with a step."""
    for pid in processes.having({MARK: os.environ[MARK]}):
        if not processes.command(pid).startswith("sleep"):
            with contextlib.suppress(ProcessLookupError):  # it has ended since it was found
                os.kill(pid, number)


def argv(image: Path, *words: str | Path) -> list[str]:
    """Return a command line that starts a container with our own runtime."""
    command = [sys.executable, "-m", "sqshforge", "run", "--runtime=builtin"]
    return [*command, str(image), *map(str, words)]


def argv_by(
    image: Path,
    *command: str,
    mounts: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    fuse: bool | None = None,
) -> list[str]:
    """Return a program that starts a container with our own runtime; `fuse` chooses the mount."""
    code = (
        "import sys; from pathlib import Path; from sqshforge.run.mounts import Mount\n"
        "from sqshforge.run.start import run\n"
        f"run(Path({str(image)!r}), sys.argv[1:], runtime='builtin', fuse={fuse!r},\n"
        f"    mounts=[Mount.parse(one) for one in {list(mounts)!r}],\n"
        f"    environment={dict(environment or {})!r})"
    )
    return [sys.executable, "-c", code, *command]


@contextmanager
def started(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a container in the background, in a session of its own, as a Slurm task has."""
    with subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def with_driver(place: Path, *devices: str) -> list[str]:
    """Words that give root's command a /dev with the device of NVIDIA's driver.

    devices: other devices that nobody may open for writing, as when Slurm gives a job none of them.
    """
    closed = " && ".join(f"touch /dev/{name} && chattr +i /dev/{name}" for name in devices)
    script = f"""
    PATH=$PATH:/usr/sbin:/usr/bin:/sbin:/bin
    mkdir {place} && mount -t tmpfs tmpfs {place} && mkdir {place}/upper {place}/work
    mount -t overlay overlay -o lowerdir=/dev,upperdir={place}/upper,workdir={place}/work /dev
    touch /dev/nvidiactl
    {closed}
    exec "$@"
    """
    return [str(shutil.which("unshare")), "--mount", str(shutil.which("bash")), "-ec", script, "-"]
