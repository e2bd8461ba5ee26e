"""Packing as an ordinary user: of a folder, in the docker group, and with buildah rootless."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge import squash
from sqshforge.programs import Programs
from sqshforge.progress import Reporter
from sqshforge.source import parse
from tests import containers, engines, oddroot, processes
from tests.conftest import ROOT
from tests.engines import docker_fixture as docker_fixture
from tests.engines import docker_host_fixture as docker_host_fixture
from tests.engines import storage_fixture as storage_fixture

UID = 41234
DOCKERS = 41235  # the group that the daemon's socket belongs to
NAME = "sqshforge-test-user"
IMAGE = "localhost/sqshforge-test-odd:1"
EPOCH = str(oddroot.TIME + 1_000_000)

# In a mount namespace: the user's line in /etc/passwd and such, /dev/fuse with the mode that udev
# gives it, and ways through the closed folders that lie above this checkout and its Python.
ENTER = """
set -e
for name in passwd group subuid subgid; do mount --bind "$0/etc/$name" "/etc/$name"; done
mount -t tmpfs tmpfs /mnt
mknod -m 0666 /mnt/fuse c 10 229
mount --bind /mnt/fuse /dev/fuse
umount --lazy /mnt
OPEN
exec "$@"
"""
AS_USER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", f"--groups={DOCKERS}")
# A user namespace that allows none within it, once the test has told it which ids are what.
# Its sh is nobody until then, so another one does what only root can.
FORBID = """
echo ready
read -r _
sh -c "echo 0 > /proc/sys/user/max_user_namespaces" && exec "$@"
"""

DRIVERS = {
    "vfs": 'driver = "vfs"\n',
    "overlay": 'driver = "overlay"\n',
    "fuse-overlayfs": 'driver = "overlay"\n[storage.options.overlay]\n'
    'mount_program = "/usr/bin/fuse-overlayfs"\n',
}


@dataclass(frozen=True)
class User:
    """A user that only what we start for it knows of, with a home in a folder of the tests."""

    place: Path
    ranges: bool = True  # whether it has ranges of uids and gids besides its own

    @property
    def home(self) -> Path:
        return self.place / "home"

    def set_up(self) -> None:
        for name in ("home", "home/tmp", "home/run", "home/.config/containers"):
            (self.place / name).mkdir(parents=True)
        (self.place / "etc").mkdir()
        lines = {
            "passwd": f"{NAME}:x:{UID}:{UID}::{self.home}:/bin/sh\n",
            "group": f"{NAME}:x:{UID}:\n",
        }
        for name, line in lines.items():
            (self.place / "etc" / name).write_text(Path("/etc", name).read_text() + line)
        for name in ("subuid", "subgid"):
            given = f"{NAME}:3000000:65536\n" if self.ranges else ""
            (self.place / "etc" / name).write_text(given)
        self.take(self.home)

    def take(self, folder: Path) -> Path:
        """Make a folder and all in it the user's, each entry with the mode that it has."""
        for path in (folder, *folder.rglob("*")):
            mode = path.lstat().st_mode
            os.lchown(path, UID, UID)
            if not path.is_symlink():
                path.chmod(mode & 0o7777)
        return folder

    def argv(self, *words: str | Path) -> list[str]:
        argv: list[str | Path] = [*self.enter(), *AS_USER, *words]
        return [str(word) for word in argv]

    def enter(self) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", ENTER.replace("OPEN", opened()), str(self.place)]

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        dropped = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "CONTAINERS_STORAGE_CONF")
        return {
            **{name: value for name, value in os.environ.items() if name not in dropped},
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "SQSHFORGE_CACHE": str(self.home / "cache"),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "1000",
            **variables,
        }

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            env=self.environment(variables),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def pack(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(*command(*words), **variables)

    def left(self) -> list[str]:
        """What is in the home that should not be there after a pack."""
        found = [*self.home.glob(".*.tmp*"), *self.home.glob(".*.lock")]
        found += [*(self.home / "tmp").iterdir(), *(self.home / "cache").rglob("*.tmp*")]
        return [str(path) for path in found]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sqshforge", "pack", *map(str, words)]


def opened() -> str:
    """A script that lets everybody through to what the command line is made of."""
    needed = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    closed = {
        path: above
        for path in sorted(needed)
        for above in reversed(path.parents)
        if not above.stat().st_mode & 0o001
    }
    script = []
    for index, path in enumerate(closed):
        script += [f'mkdir -p "$0/{index}"', f'mount --bind {shlex.quote(str(path))} "$0/{index}"']
    script += [
        f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(p))}" for p in {*closed.values()}
    ]
    for index, path in enumerate(closed):
        quoted = shlex.quote(str(path))
        script += [f"mkdir -p {quoted}", f'mount --bind "$0/{index}" {quoted}']
    return "\n".join(script)


@contextmanager
def existing(ranges: bool = True) -> Iterator[User]:
    """A user for the length of a block."""
    place = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    try:
        place.chmod(0o755)
        user = User(place, ranges)
        user.set_up()
        yield user
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with existing() as user:
        yield user


@pytest.fixture(autouse=True)
def nothing_stays(user: User) -> Iterator[None]:
    with containers.watched(user.place):
        yield
    assert user.left() == []


@pytest.fixture(scope="module")
def context(user: User) -> Path:
    """A folder that everybody can build the odd image from, with a /sqshforge on top.

    Without its device: an ordinary user's engine cannot make one.
    """
    tree = oddroot.make(user.place / "odd/tree")
    (tree / "run/zero").unlink()
    folder = user.place / "context"
    (folder / "code").mkdir(parents=True)
    (folder / "code/train.py").write_text("print('training')\n")
    os.utime(folder / "code/train.py", (oddroot.TIME, oddroot.TIME))
    oddroot.tar(tree, folder / "rootfs.tar")
    (folder / "Dockerfile").write_text(oddroot.DOCKERFILE + "COPY code /sqshforge\n")
    return folder


def by_root(address: str, output: Path) -> Path:
    options = squash.Options.of("fast")
    squash.pack(parse(address, Programs()), output, options, Programs(), Reporter(quiet=True))
    return output


# A folder.


@pytest.fixture(scope="module")
def tree(user: User) -> Path:
    """A folder of the user's, with all that is odd; closed to others, and partly to the user."""
    return user.take(oddroot.make(user.home / "tree"))


def test_a_folder_of_the_user_s_gives_the_bytes_that_root_gets(
    user: User, tree: Path, tmp_path: Path
) -> None:
    done = user.pack(f"rootfs:{tree}", "-o", "folder.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    output = user.home / "folder.sqsh"
    assert output.read_bytes() == by_root(f"rootfs:{tree}", tmp_path / "a.sqsh").read_bytes()
    assert (output.stat().st_uid, output.stat().st_mode & 0o777) == (UID, 0o644)
    found = oddroot.unpacked(output, tmp_path / "found")
    assert (found["data/file-000"].mode, found["dir-000"].mode) == (0o400, 0o700)
    assert "dir-000/inside" in found


@contextmanager
def without_namespaces(user: User, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A program on a machine that gives its users no user namespaces."""
    argv = [*user.enter(), "unshare", "--user", "sh", "-c", FORBID, "sh", *AS_USER, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        list(map(str, argv)),
        env=user.environment({}),
        cwd=user.home,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            for name in ("uid", "gid"):
                Path(f"/proc/{process.pid}/{name}_map").write_text("0 0 4294967295")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("address", ["rootfs:tree", f"buildah://{IMAGE}"])
def test_a_machine_without_user_namespaces_is_one_clear_error(
    address: str, user: User, tree: Path
) -> None:
    with without_namespaces(user, *command(address, "-o", "a.sqsh")) as process:
        out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (3, "")
    assert "user namespace" in err and "Traceback" not in err
    assert "mend:  pack as root; or as root: sysctl user.max_user_namespaces=" in err
    assert len(err.splitlines()) <= 6
    assert not list(user.home.glob("a.sqsh*"))


# The docker group.


@pytest.fixture
def in_docker(user: User, context: Path, docker: str) -> str:
    """The odd image in a daemon whose socket is a group's; its address."""
    socket = Path(docker.removeprefix("unix://"))
    socket.parent.chmod(0o711)
    os.chown(socket, 0, DOCKERS)
    socket.chmod(0o660)
    return f"dockerd://{oddroot.in_docker(context, docker)}"


def listed(*words: str) -> list[str]:
    return Programs().capture([engines.CLIENT, *words]).split()


def test_a_user_in_the_docker_group_gets_what_root_gets(
    user: User, in_docker: str, tmp_path: Path
) -> None:
    before = listed("volume", "ls", "--quiet")
    done = user.pack(in_docker, "-o", "docker.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert "docker.sqsh: packed in" in done.stdout
    again = user.pack(in_docker, "-o", "docker.sqsh", "--profile", "fast")
    assert (again.returncode, "docker.sqsh: up to date" in again.stdout) == (0, True), again.stderr
    assert listed("ps", "--all", "--quiet") == []
    assert listed("volume", "ls", "--quiet") == before

    output = user.home / "docker.sqsh"
    assert output.stat().st_uid == UID
    expected = oddroot.unpacked(by_root(in_docker, tmp_path / "a.sqsh"), tmp_path / "expected")
    assert oddroot.unpacked(output, tmp_path / "found") == expected
    assert "data/one" in expected and "sqshforge/train.py" in expected


def test_a_user_who_may_not_talk_to_docker_is_told_so(user: User, in_docker: str) -> None:
    Path(os.environ["DOCKER_HOST"].removeprefix("unix://")).chmod(0o600)
    done = user.pack(in_docker, "-o", "x.sqsh")
    assert (done.returncode, done.stdout) == (3, "")
    assert "docker does not answer" in done.stderr and "ermission denied" in done.stderr


# Buildah.


@pytest.fixture(scope="module", params=DRIVERS)
def rootless(request: pytest.FixtureRequest, context: Path) -> Iterator[User]:
    """A user who has the odd image in a buildah storage of one kind."""
    with existing() as user:
        set_storage(user, DRIVERS[request.param])
        build(user, context)
        yield user
        assert user.left() == []


def set_storage(user: User, settings: str) -> None:
    file = user.home / ".config/containers/storage.conf"
    file.write_text(
        f'[storage]\ngraphroot = "{user.home}/graph"\nrunroot = "{user.home}/run/c"\n{settings}'
    )


def build(user: User, context: Path, name: str = IMAGE) -> None:
    argv: list[str | Path] = ["buildah", "build", "--isolation", "chroot", "--format", "docker"]
    done = user.run(*argv, "--quiet", "--tag", name, context)
    assert done.returncode == 0, done.stderr


def working_containers(user: User) -> list[str]:
    done = user.run("buildah", "containers", "--quiet")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def expected(storage: None, context: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What root gets of the same image, built by root."""
    argv: list[str | Path] = ["buildah", "build", "--isolation", "chroot", "--format", "docker"]
    Programs().capture([*argv, "--quiet", "--tag", IMAGE, context])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH)
        return by_root(f"buildah://{IMAGE}", tmp_path_factory.mktemp("root") / "a.sqsh")


def test_buildah_without_root_gives_the_bytes_that_root_gets(
    rootless: User, expected: Path, tmp_path: Path
) -> None:
    words = (f"buildah://{IMAGE}", "-o", "a.sqsh", "--profile", "fast")
    done = rootless.pack(*words, SOURCE_DATE_EPOCH=EPOCH)
    assert done.returncode == 0, done.stderr
    assert "a.sqsh: packed in" in done.stdout
    again = rootless.pack(*words, SOURCE_DATE_EPOCH=EPOCH)
    assert (again.returncode, "a.sqsh: up to date" in again.stdout) == (0, True), again.stderr
    output = rootless.home / "a.sqsh"
    found = oddroot.unpacked(output, tmp_path / "found")
    assert found == oddroot.unpacked(expected, tmp_path / "expected")
    assert output.read_bytes() == expected.read_bytes()
    assert (output.stat().st_uid, output.stat().st_mode & 0o777) == (UID, 0o644)
    assert working_containers(rootless) == []


def test_the_cache_of_bases_is_the_user_s_own(context: Path) -> None:
    """The kernel's overlay shows the layers; another change of /sqshforge needs no more."""
    with existing() as user:
        set_storage(user, DRIVERS["overlay"])
        build(user, context)
        words = (f"buildah://{IMAGE}", "--profile", "fast", "-o")
        assert user.pack(*words, "a.sqsh").returncode == 0
        again = user.pack(*words, "b.sqsh")
        assert again.returncode == 0, again.stderr
        assert "all but /sqshforge comes from the cache of bases" in again.stderr
        kept = list((user.home / "cache").rglob("*"))
        assert kept and {path.stat().st_uid for path in kept} == {UID}
        assert user.left() == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_packer_of_buildah_s_that_gets_a_signal(
    how: signal.Signals, user: User, tmp_path: Path
) -> None:
    """It is one process, in which a signal is the packer's own and the exit code too."""
    (tmp_path / "etc").mkdir()
    for index in range(16):
        (tmp_path / f"words-{index}").write_text(os.urandom(2 << 20).hex())
    context = user.place / f"context-{how.name}"
    context.mkdir()
    oddroot.tar(tmp_path, context / "rootfs.tar")
    (context / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    set_storage(user, DRIVERS["vfs"])
    build(user, context, "localhost/slow:1")
    folder = user.home / how.name
    folder.mkdir()
    user.take(folder)
    words = ("buildah://localhost/slow:1", "-o", folder / "a.sqsh", "--jobs", "1")
    with subprocess.Popen(
        user.argv(*command(*words, "--profile", "archive")),
        env=user.environment({}),
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert containers.until(
                lambda: any(path.stat().st_size > 1 << 20 for path in folder.glob(".*.tmp"))
            )
            process.send_signal(how)
            process.wait(timeout=20)
        finally:
            processes.kill([process.pid])
    if how == signal.SIGKILL:
        assert not (folder / "a.sqsh").exists()
        assert user.pack(*words, "--profile", "fast").returncode == 0
        assert {path.name for path in folder.iterdir()} == {"a.sqsh", "a.sqsh.json"}
    else:
        assert process.returncode == 128 + how
        assert list(folder.iterdir()) == []
    assert working_containers(user) == []


def test_a_user_without_ranges_of_ids_is_told_how_to_get_them() -> None:
    with existing(ranges=False) as user:
        done = user.pack("buildah://x", "-o", "a.sqsh")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"the user {NAME} has no range of uids" in done.stderr
    assert f"usermod --add-subuids 100000-165535 {NAME}" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_machine_without_newuidmap_names_its_package(user: User) -> None:
    tools = user.home / "bin"
    tools.mkdir()
    for name in ("buildah", "sh"):
        (tools / name).symlink_to(Programs().require(name))
    done = user.run("env", f"PATH={tools}", *command("buildah://x", "-o", "a.sqsh"))
    assert (done.returncode, done.stdout) == (3, "")
    assert "the program newuidmap is not installed" in done.stderr
    assert "mend:  apt-get install uidmap" in done.stderr


def test_an_image_that_the_user_does_not_have(rootless: User) -> None:
    done = rootless.pack("buildah://sqshforge-no-such", "-o", "b.sqsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "buildah has no image 'sqshforge-no-such'" in done.stderr
