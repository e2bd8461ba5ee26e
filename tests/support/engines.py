"""A private docker daemon for the tests: on its own socket, in its own folder, gone afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sqshforge import engine
from sqshforge.engine import Engine
from sqshforge.host.programs import Programs, stop
from sqshforge.image.docker import Dockerd, Saved

TIMEOUT = 300.0  # seconds until the daemon must answer
# Debian's own client, which has BuildKit; another one on the PATH may not have it.
CLIENT = Path("/usr/bin/docker")
BOTH = ["buildah", pytest.param("docker", marks=pytest.mark.root)]


@contextmanager
def daemon(before: Sequence[str] = (), options: Sequence[str] = ()) -> Iterator[str]:
    """Run Debian's dockerd for the length of a block; yields the value of DOCKER_HOST.

    It touches neither the network of this machine nor another daemon's containers. `before` are
    words that start it, `options` are additional ones of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="sqd-"))  # short: a socket's path has 107 bytes at most
    host = f"unix://{folder}/s"
    argv = [*before, "/usr/sbin/dockerd", *options, "--storage-driver=overlay2", "--iptables=false"]
    argv += ["--ip-forward=false", "--bridge=none", "-H", host, "--data-root", str(folder / "d")]
    argv += ["--exec-root", str(folder / "e"), "--pidfile", str(folder / "pid")]
    try:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                _await(process, host, folder / "log")
                yield host
            finally:
                stop(process, timeout=30.0)
    finally:
        _unmount(folder)
        shutil.rmtree(folder)


def _await(process: subprocess.Popen[bytes], host: str, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while Programs().attempt([CLIENT, "--host", host, "version"]).code != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"dockerd does not answer:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _unmount(folder: Path) -> None:
    """Detach what the daemon leaves mounted (its network namespace), innermost first."""
    for place in reversed(mounts(folder)):
        Programs().attempt(["umount", "--lazy", place])


def mounts(folder: Path) -> list[str]:
    """Return the mount points in a folder."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.startswith(f"{folder}/")]


@pytest.fixture(name="docker_host", scope="module")
def docker_host_fixture(as_root: None) -> Iterator[str]:
    """The DOCKER_HOST of a private daemon; the variable itself is left alone."""
    with daemon() as host:
        yield host


@pytest.fixture(name="docker")
def docker_fixture(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make everything in the test talk to the private daemon."""
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    return docker_host


class Unmounted(Dockerd):
    """A docker image as seen by a user who may not read its layers' folders."""

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Saved]:
        yield Saved(self.name, self._facts, self._daemon, self.reporter)


@contextmanager
def storage(folder: Path) -> Iterator[None]:
    """Give buildah an empty storage of its own for the length of a block; it is removed afterwards.

    This machine's images with the same names are not touched.
    """
    place = folder / "storage"
    settings = folder / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/graph"\nrunroot = "{place}/run"\n'
        f'rootless_storage_path = "{place}/graph"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(settings))
        if os.geteuid() != 0:  # the run-time folder of a user's storage cannot be configured
            (place / "run").mkdir(parents=True, mode=0o700)
            patch.setenv("XDG_RUNTIME_DIR", str(place / "run"))
        try:
            yield
        finally:
            _unmount(folder)
            _remove(place)


def _remove(place: Path) -> None:
    """Remove a storage; as a user, including files that belong to any of the user's ids."""
    if os.geteuid() == 0:
        shutil.rmtree(place, ignore_errors=True)
    else:
        Programs().attempt(["buildah", "unshare", "rm", "-rf", place])


@pytest.fixture(name="storage", scope="module")
def storage_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make everything that calls buildah in the module use a storage of the tests' own."""
    with storage(tmp_path_factory.mktemp("buildah")):
        yield


@pytest.fixture(name="engine", params=BOTH)
def engine_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Each engine in turn, with images of the tests' own."""
    request.getfixturevalue("storage")
    if request.param == "docker":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker_host"))
    return engine.choose(request.param, Programs())


def printed(image: str, *words: str) -> str:
    """What a command prints in a container of an image in buildah's storage.

    By way of a file: `buildah run` with chroot isolation ends when the command does, and what it
    has not yet passed on of the command's output is lost.
    """
    programs = Programs()
    container = programs.capture(["buildah", "from", image]).strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            argv = ["buildah", "run", "--isolation", "chroot", "--volume", f"{folder}:/printed"]
            argv += [container, "--", "sh", "-c", 'exec "$@" > /printed/output', "sh", *words]
            programs.capture(argv)
            return (Path(folder) / "output").read_text()
    finally:
        programs.capture(["buildah", "rm", container])
