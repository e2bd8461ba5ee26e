"""Malicious images, started as root: they can neither change nor show anything of the host.

They are started with `sqshforge run` and with `sqshforge smoke-test`, whose program in the image is
the image's own.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.image.enroot import ImageConfig
from tests.support import containers, tiny_root

pytestmark = [pytest.mark.processes, pytest.mark.root]

PROGRAMS = Programs()
HOST = ("/", "/dev", "/dev/shm", "/etc", "/root", "/sys/fs/cgroup", "/tmp", "/var/tmp")
BYTES = b"precious" * 8192
# What the runtime or the shell reads from an image before its command runs.
READ = ["etc/passwd", "etc/group", "etc/environment", "etc/fstab", "etc/login.defs", "etc/hosts"]
# A `mount` as on a machine without loop devices: squashfuse takes over.
NO_LOOP = '#!/bin/sh\ncase "$*" in *"-t squashfs"*) exit 32 ;; esac\nexec /usr/bin/mount "$@"\n'
# In place of Python for the smoke test: runs a command, and reports on it as a finding.
FINDS = """#!/bin/sh
said=$({command} 2>&1) && ok=true || ok=false
printf '{{"ok": %s, "checks": [{{"name": "x", "ok": %s, "seconds": 0, "detail": "' $ok $ok
printf '%s\\n' "$said" | while IFS= read -r line; do printf '%s\\\\n' "$line"; done
printf '"}}]}}'
[ $ok = true ]
"""


@dataclass(frozen=True)
class Disk:
    """A disk of the host: its device number, and the file that holds its bytes."""

    number: int
    file: Path


@dataclass(frozen=True)
class Done:
    """How a command in a container ended, and its output; or why it could not start."""

    code: int
    said: str


Change = Callable[[Path], object]


@dataclass(frozen=True)
class Way:
    """One way in which a user starts an image."""

    command: str  # of sqshforge
    folder: Path  # for the image
    path: str  # PATH

    def start(
        self, change: Change, *words: str, mounts: tuple[str, ...] = (), **config: object
    ) -> Done:
        """Pack a small root after `change`, and run a command in it."""

        def prepare(root: Path) -> None:
            python = root / "usr/bin/python3"
            python.write_text(FINDS.format(command=shlex.join(words)))
            python.chmod(0o755)
            change(root)

        settings = ImageConfig(reference="evil", **config)  # type: ignore[arg-type]
        image = tiny_root.sqsh(self.folder / uuid.uuid4().hex, settings, prepare)
        argv = [sys.executable, "-m", "sqshforge", self.command, str(image)]
        if self.command == "run":
            argv += ["--runtime", "builtin", *(f"--mount={one}" for one in mounts), "--", *words]
        else:
            argv += ["--json"]
        done = subprocess.run(
            argv,
            env={**os.environ, "PATH": self.path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if self.command == "smoke-test" and done.stdout:
            (check,) = json.loads(done.stdout)["checks"]
            return Done(done.returncode, check["detail"])
        return Done(done.returncode, done.stdout + done.stderr)


def way(command: str, has_loop: bool, place: Path) -> Way:
    folder = place / "images"
    folder.mkdir()
    programs = place / "programs"
    programs.mkdir()
    if not has_loop:
        (programs / "mount").write_text(NO_LOOP)
        (programs / "mount").chmod(0o755)
    return Way(command, folder, f"{programs}:{os.environ['PATH']}")


@pytest.fixture(
    params=[
        pytest.param(("run", True), id="run-kernel"),
        pytest.param(("run", False), id="run-squashfuse"),
        pytest.param(("smoke-test", True), id="smoke-test"),
    ]
)
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    command, has_loop = request.param
    return way(command, has_loop, tmp_path)


@pytest.fixture(params=[True, False], ids=["kernel", "squashfuse"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    """For what `smoke-test` does not have: mounts."""
    return way("run", request.param, tmp_path)


@pytest.fixture
def name() -> str:
    """Return a name that nothing on the host has."""
    return f"evil-{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk, whose bytes must be the same afterwards."""
    file = tmp_path / "disk"
    file.write_bytes(BYTES)
    loop = PROGRAMS.capture(["losetup", "--find", "--show", file]).strip()
    try:
        yield Disk(Path(loop).stat().st_rdev, file)
        PROGRAMS.capture(["blockdev", "--flushbufs", loop])
    finally:
        PROGRAMS.capture(["losetup", "--detach", loop])
    assert file.read_bytes() == BYTES


@pytest.fixture(autouse=True)
def untouched(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the host's folders are unchanged afterwards; the caller's two to the last byte."""
    own = tmp_path / "own"
    for variable in ("HOME", "TMPDIR"):
        (own / variable / "folder").mkdir(parents=True)
        (own / variable / "folder" / "file").write_text("of the host\n")
        monkeypatch.setenv(variable, f"{own}/{variable}")
    before, whole = listed(), contents(own)
    with containers.watched(tmp_path / "images"):
        yield
    after = listed()
    assert [one for one in after.keys() - before.keys() if "evil-" in one] == []
    # Others use /tmp and /var/tmp as well, so there only the names count.
    both = {one for one in after.keys() & before.keys() if "/tmp/" not in one}
    assert {one: after[one] for one in both} == {one: before[one] for one in both}
    # The process that cleans up removes its folder in TMPDIR a moment later.
    assert containers.until(lambda: contents(own) == whole), contents(own)


def listed() -> Mapping[str, tuple[int, ...]]:
    """Return mode, owner and device of what is in the host's folders, which others use as well."""
    found = {}
    for place in HOST:
        for path in Path(place).iterdir():
            try:
                one = path.lstat()
            except FileNotFoundError:  # it was another process's, and is gone
                continue
            found[str(path)] = (one.st_mode, one.st_uid, one.st_gid, one.st_rdev)
    return found


def contents(place: Path) -> Mapping[str, tuple[object, ...]]:
    found = {}
    for path in place.rglob("*"):
        one = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(one.st_mode) else b""
        found[str(path)] = (one.st_mode, one.st_uid, one.st_gid, content)
    return found


def replaced(root: Path, file: str) -> Path:
    """Return the place of a file in a root, after removing what was there."""
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).unlink(missing_ok=True)
    return root / file


FILES = pytest.mark.parametrize(
    "files", [[*READ, "etc/skel/x"], ["etc/rc"]], ids=["all-that-is-read", "what-is-run"]
)


@FILES
def test_a_device_in_the_place_of_a_file_is_neither_written_nor_read(
    files: list[str], started: Way, disk: Disk
) -> None:
    def change(root: Path) -> None:
        for file in files:
            os.mknod(replaced(root, file), 0o666 | stat.S_IFBLK, disk.number)

    done = started.start(change, "cat", "/etc/passwd", "/etc/group", env=("HOME=/home/new",))
    assert done.code == 0 and done.said.count(":0:") >= 2, done
    assert "precious" not in done.said


def test_a_device_outside_of_dev_cannot_be_opened(started: Way, disk: Disk) -> None:
    def change(root: Path) -> None:
        os.mknod(root / "usr/disk", 0o666 | stat.S_IFBLK, disk.number)

    done = started.start(change, "sh", "-c", "echo spoilt > /usr/disk; head -c 8 /usr/disk")
    assert done.code != 0 and "precious" not in done.said, done


@FILES
def test_a_pipe_in_the_place_of_a_file_stops_nothing(files: list[str], started: Way) -> None:
    def change(root: Path) -> None:
        for file in files:
            os.mkfifo(replaced(root, file))

    done = started.start(change, "id", "-u", env=("HOME=/home/new",))
    assert (done.code, done.said) == (0, "0\n")


def test_a_link_to_what_never_ends_stops_nothing(started: Way) -> None:
    """The kernel's log is a regular file in /proc, and reading it blocks at its end."""

    def change(root: Path) -> None:
        for file in READ:
            replaced(root, file).symlink_to("/proc/kmsg")

    done = started.start(change, "id", "-u")
    assert (done.code, done.said) == (0, "0\n")


@pytest.mark.parametrize("file", ["etc/passwd", "etc/hosts"])
def test_a_folder_in_the_place_of_a_file_is_reported(file: str, started: Way) -> None:
    done = started.start(lambda root: replaced(root, file).mkdir(), "id", "-u")
    assert done.code == 1
    assert "the container cannot be set up: [Errno 21] Is a directory" in done.said


def test_nothing_of_the_host_is_copied_by_a_link_in_etc_skel(started: Way) -> None:
    folder = f"{os.environ['HOME']}/folder"

    def change(root: Path) -> None:
        for name, link in (("a", f"{folder}/file"), ("b", folder), ("c", "/proc/self/environ")):
            replaced(root, f"etc/skel/{name}").symlink_to(link)

    script = "ls ~; [ -L ~/a ] && [ -L ~/b ] && [ -L ~/c ]"
    done = started.start(change, "sh", "-c", script, env=("HOME=/home/new",))
    assert (done.code, done.said) == (0, "a\nb\nc\n")


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("/dev", "/data"),
        ("/dev/shm", "/data/x/y"),
        ("/sys/fs/cgroup", "/data/x/y"),
        ("/proc", "/data"),
    ],
)
def test_a_link_to_what_is_the_host_s_gets_no_mount(
    place: str, target: str, name: str, run: Way, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()

    def change(root: Path) -> None:
        (root / "data").symlink_to(f"{place}/{name}")

    done = run.start(change, "id", mounts=(f"{tmp_path}/mine:{target}",))
    assert done.code == 1, done
    assert f"the mount target {target} is inside the host's /" in done.said
    assert not os.path.lexists(f"{place}/{name}")


@pytest.mark.parametrize("link", ["/mine/evil", "/usr/../mine/evil/deep"])
def test_a_link_into_another_mount_makes_nothing_there(link: str, run: Way, tmp_path: Path) -> None:
    for one in ("mine", "other"):
        (tmp_path / one).mkdir()
    mounts = (f"{tmp_path}/mine:/mine", f"{tmp_path}/other:/other")
    done = run.start(lambda root: (root / "other").symlink_to(link), "id", mounts=mounts)
    assert done.code == 1, done
    assert f"target /other is inside the host's {tmp_path}/mine and does not exist" in done.said
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("place", ["/dev/shm", "/sys/fs/cgroup", "/tmp"])
def test_neither_home_nor_volume_is_made_on_the_host(place: str, name: str, started: Way) -> None:
    places = ("/dev", "/dev/shm", "/sys/fs/cgroup", "/tmp", "/root")
    done = started.start(
        lambda root: None,
        *("id", "-u"),
        env=(f"HOME={place}/{name}",),
        volumes=tuple(f"{one}/{name}" for one in places),
    )
    assert done.code == 0, done
    if started.command == "run":  # it shows the runtime's output; /tmp and /root are the image's
        left_out = [line for line in done.said.splitlines() if "left out, as it is" in line]
        assert len(left_out) == 3, done
    assert [one for one in places if os.path.lexists(f"{one}/{name}")] == []


def test_no_line_of_an_image_binds_a_folder_of_the_host(started: Way) -> None:
    lines = [
        "/ /host none bind,rw\n",
        # Characters that look like blanks or line ends, but are not for fstab.
        "${ENROOT_ROOTFS}/cr\r/\x0b/host\x0bnone\x0bbind,rw /x none bind\n",
        "${ENROOT_ROOTFS}/a\u2003/\u2003/host none bind\n",
        "#\r/ /host none bind,rw\n",
    ]

    def change(root: Path) -> None:
        (root / "etc/fstab").write_bytes("".join(lines).encode())

    assert started.start(change, "ls", f"/host{os.environ['HOME']}/folder").code != 0


def test_a_volume_of_what_is_the_host_s_stays_as_restricted(started: Way) -> None:
    """The mount of /sys is read-only, even if the image asks for it a second time."""

    def change(root: Path) -> None:
        line = "${ENROOT_ROOTFS}/sys/fs/cgroup /again none bind,rw\n"
        (root / "etc/fstab").write_text(line)

    done = started.start(change, "mkdir", "/again/evil-folder")
    assert done.code != 0 and "Read-only file system" in done.said, done


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("etc/environment", b"A=1\0B=2\n"),
        ("etc/fstab", b"${ENROOT_ROOTFS}/a\0b /a none bind,rw\n"),
        ("etc/fstab", rb"${ENROOT_ROOTFS}/a\000b /a none bind,rw"),
    ],
)
def test_a_nul_is_reported_in_two_lines(file: str, content: bytes, started: Way) -> None:
    done = started.start(lambda root: (root / file).write_bytes(content), "true")
    assert done.code == 1, done
    assert "the container cannot be set up: embedded null byte" in done.said
    if started.command == "run":
        assert len(done.said.splitlines()) == 2
