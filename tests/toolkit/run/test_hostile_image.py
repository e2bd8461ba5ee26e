"""Images that mean harm, started as root: nothing of the host is written or shown for them."""

from __future__ import annotations

import os
import stat
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.image.enroot import ImageConfig
from tests.support import containers, tiny_root

pytestmark = [pytest.mark.processes, pytest.mark.root]

PROGRAMS = Programs()
HOST = [Path(one) for one in ("/dev", "/dev/shm", "/sys/fs/cgroup", "/", "/root")]


@pytest.fixture
def name() -> str:
    """A name that nothing of the host has."""
    return f"evil-{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def untouched(tmp_path: Path) -> Iterator[None]:
    """What lies in these folders of the host is the same afterwards, and no container stays."""
    before = _listed()
    with containers.watched(tmp_path):
        yield
    assert [one for one in _listed() - before if "evil-" in one] == []


def _listed() -> set[str]:
    return {str(one) for place in HOST for one in place.iterdir()}


@contextmanager
def block_device(folder: Path) -> Iterator[tuple[int, Path]]:
    """A disk of the host's, as a number of a device and the file that it keeps its bytes in."""
    disk = folder / "disk"
    disk.write_bytes(b"precious" * 8192)
    loop = PROGRAMS.capture(["losetup", "--find", "--show", disk]).strip()
    try:
        yield Path(loop).stat().st_rdev, disk
    finally:
        PROGRAMS.capture(["losetup", "--detach", loop])


def start(
    image: Path, *words: str, mounts: tuple[str, ...] = (), env: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`sqshforge run` by our own runtime."""
    options = ["--runtime", "builtin"]
    options += [word for one in mounts for word in ("--mount", one)]
    options += [word for one in env for word in ("--env", one)]
    return subprocess.run(
        containers.argv(image, *options, "--", *words),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def made(place: Path, change: Callable[[Path], object], **config: object) -> Path:
    settings = ImageConfig(reference="evil", **config)  # type: ignore[arg-type]
    return tiny_root.sqsh(place / "evil", settings, change)


@pytest.mark.parametrize("file", ["etc/passwd", "etc/group"])
def test_a_device_in_the_place_of_a_file_is_replaced_and_not_written_to(
    file: str, tmp_path: Path
) -> None:
    with block_device(tmp_path) as (number, disk):
        before = disk.read_bytes()

        def change(root: Path) -> None:
            (root / file).unlink()
            os.mknod(root / file, 0o666 | stat.S_IFBLK, number)

        done = start(made(tmp_path, change), "cat", f"/{file}")
        PROGRAMS.capture(["sync"])
        assert disk.read_bytes() == before
    assert done.returncode == 0 and ":0:" in done.stdout, done.stderr


def test_a_device_outside_of_dev_cannot_be_opened(tmp_path: Path) -> None:
    with block_device(tmp_path) as (number, disk):
        image = made(
            tmp_path, lambda root: os.mknod(root / "usr/disk", 0o666 | stat.S_IFBLK, number)
        )
        done = start(image, "head", "-c", "8", "/usr/disk")
        assert done.returncode != 0 and "precious" not in done.stdout
        assert disk.read_bytes().startswith(b"precious")


@pytest.mark.parametrize("file", ["etc/passwd", "etc/group", "etc/environment", "etc/fstab"])
def test_a_pipe_in_the_place_of_a_file_stops_nothing(file: str, tmp_path: Path) -> None:
    def change(root: Path) -> None:
        (root / file).unlink()
        os.mkfifo(root / file)

    done = start(made(tmp_path, change), "id", "-u")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.parametrize("place", ["/dev", "/dev/shm", "/sys/fs/cgroup", "/proc"])
def test_a_link_to_what_is_the_host_s_gets_no_mount(place: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    image = made(tmp_path, lambda root: (root / "data").symlink_to(f"{place}/{name}"))
    for target in ("/data", "/data/x/y"):
        done = start(image, "id", mounts=(f"{tmp_path}/mine:{target}",))
        assert done.returncode == 1, done.stderr
        assert f"the mount's target {target} lies in the host's /" in done.stderr
        assert not os.path.lexists(f"{place}/{name}")


@pytest.mark.parametrize("place", ["/dev", "/dev/shm", "/sys/fs/cgroup"])
def test_neither_home_nor_volume_is_made_in_what_is_the_host_s(
    place: str, name: str, tmp_path: Path
) -> None:
    home = made(tmp_path, lambda root: None, env=(f"HOME={place}/{name}",))
    assert start(home, "id").returncode == 0
    assert not os.path.lexists(f"{place}/{name}")
    (tmp_path / "other").mkdir()
    volume = made(tmp_path / "other", lambda root: None, volumes=(f"{place}/{name}",))
    done = start(volume, "id")
    assert done.returncode == 0 and f"{place}/{name}" in done.stderr, done.stderr
    assert not os.path.lexists(f"{place}/{name}")


@pytest.mark.parametrize(
    "line",
    [
        "/ /host none bind,rw\n",
        # Blanks that are none to fstab, and ends of lines that are none.
        "${ENROOT_ROOTFS}/cr\r/\x0b/host\x0bnone\x0bbind,rw /x none bind\n",
        "${ENROOT_ROOTFS}/a\u2003/\u2003/host none bind\n",
        "#\r/ /host none bind,rw\n",
    ],
)
def test_no_line_of_an_image_binds_a_folder_of_the_host(line: str, tmp_path: Path) -> None:
    mark = tmp_path / "of-the-host"
    mark.touch()
    image = made(tmp_path, lambda root: (root / "etc/fstab").write_bytes(line.encode()))
    done = start(image, "ls", f"/host{mark}")
    assert done.returncode != 0 and "of-the-host\n" not in done.stdout, done.stdout
