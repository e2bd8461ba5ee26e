"""An ordinary user of this machine for a test, and the images that the user packs."""

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

from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image.address import parse
from sqshforge.squash import pack as squash
from tests.conftest import ROOT
from tests.support import checkouts, containers, odd_root, processes

UID = 41234
DOCKERS = 41235  # the group that owns the daemon's socket
NAME = "sqshforge-test-user"

# In a mount namespace: the user's lines in /etc/passwd and the like, /dev/fuse with the mode that
# udev gives it, and access through the closed folders above this checkout and its Python.
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
# A user namespace that allows none within it, once the test has mapped its ids. Until then its sh
# is nobody, so a new sh does what only root can do.
FORBID = """
echo ready
read -r _
sh -c "echo 0 > /proc/sys/user/max_user_namespaces" && exec "$@"
"""


@dataclass(frozen=True)
class User:
    """A user known only to the programs that we start for it, with a home in the tests' folder."""

    place: Path
    ranges: bool = True  # whether it has ranges of uids and gids besides its own
    own_cache: Path | None = None  # instead of the one in the home

    @property
    def home(self) -> Path:
        return self.place / "home"

    @property
    def cache(self) -> Path:
        return self.own_cache or self.home / "cache"

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
        """Give the user a folder and everything in it; each entry keeps its mode."""
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
            "SQSHFORGE_CACHE": str(self.cache),
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
            timeout=300,
            check=False,
        )

    def pack(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(*command(*words), **variables)

    def left(self) -> list[str]:
        """Return what is in the home that should not be there after a pack."""
        found = [*self.home.glob(".*.tmp*"), *self.home.glob(".*.lock")]
        found += [*(self.home / "tmp").iterdir(), *self.cache.rglob("*.tmp*")]
        return [str(path) for path in found]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sqshforge", "pack", *map(str, words)]


def checkout(user: User, line: str = "RUN touch /one") -> Path:
    """Make a checkout of the user's with a small image to build, and the bases that exist here."""
    place = checkouts.copy(user.place / "checkout", lines=f"{line}\nRUN touch /two")
    for name in ("bases", "vendor"):  # links into this checkout
        (place / "build" / name).unlink()
    (place / "build/bases").mkdir()
    for base in (ROOT / "build/bases").glob("base-*.tar"):
        shutil.copy(base, place / "build/bases")
    return user.take(place)


def pack_target(user: User, checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `sqshforge pack cpu-mamba` in a checkout of the user's."""
    argv = [sys.executable, "-m", "sqshforge", "pack", checkouts.TARGET, "--profile", "fast"]
    return user.run(*argv, PYTHONPATH=str(checkout), **variables)


def opened() -> str:
    """Return a script that gives everybody access to the folders that the command line needs."""
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
    """Create a user for the length of a block."""
    place = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    try:
        place.chmod(0o755)
        user = User(place, ranges)
        user.set_up()
        yield user
    finally:
        shutil.rmtree(place)


@contextmanager
def without_namespaces(user: User, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program on a machine that does not give its users user namespaces."""
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


def by_root(address: str, output: Path) -> Path:
    options = squash.Options.of("fast")
    squash.pack(parse(address, Programs()), output, options, Programs(), Reporter(quiet=True))
    return output


@pytest.fixture(name="user", scope="module")
def user_fixture(as_root: None) -> Iterator[User]:
    with existing() as user:
        yield user


@pytest.fixture(name="nothing_stays", autouse=True)
def nothing_stays_fixture(user: User) -> Iterator[None]:
    with containers.watched(user.place):
        yield
    assert user.left() == []


@pytest.fixture(name="context", scope="module")
def context_fixture(user: User) -> Path:
    """Make a folder from which every user can build the odd image, with a /sqshforge on top.

    It lacks the device, which an ordinary user's engine cannot make.
    """
    tree = odd_root.make(user.place / "odd/tree")
    (tree / "run/zero").unlink()
    folder = user.place / "context"
    (folder / "code").mkdir(parents=True)
    (folder / "code/train.py").write_text("print('training')\n")
    os.utime(folder / "code/train.py", (odd_root.TIME, odd_root.TIME))
    odd_root.tar(tree, folder / "rootfs.tar")
    (folder / "Dockerfile").write_text(odd_root.DOCKERFILE + "COPY code /sqshforge\n")
    return folder


def incompressible(user: User, name: str) -> Path:
    """Make a folder to build an image from that takes a while to pack."""
    folder = user.place / f"context-{name}"
    (folder / "tree").mkdir(parents=True)
    for index in range(16):
        (folder / f"tree/words-{index}").write_text(os.urandom(2 << 20).hex())
    odd_root.tar(folder / "tree", folder / "rootfs.tar")
    shutil.rmtree(folder / "tree")
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    return folder


def struck(user: User, address: str, how: signal.Signals) -> None:
    """Signal a running pack: after the next pack, at the latest, nothing partial is left."""
    folder = user.home / how.name
    folder.mkdir()
    user.take(folder)
    words = (address, "-o", folder / "a.sqsh", "--jobs", "1")
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
            process.wait(timeout=300)
        finally:
            processes.kill([process.pid])
    if how == signal.SIGKILL:
        assert not (folder / "a.sqsh").exists()
        assert user.pack(*words, "--profile", "fast").returncode == 0
        assert {path.name for path in folder.iterdir()} == {"a.sqsh", "a.sqsh.json"}
    else:
        assert process.returncode == 128 + how
        assert list(folder.iterdir()) == []
