"""Packing as an ordinary user: the user's own folder, and rootless buildah."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from tests.support import odd_root
from tests.support.engines import storage_fixture as storage_fixture
from tests.support.ordinary_user import (
    NAME,
    UID,
    User,
    by_root,
    command,
    existing,
    incompressible,
    struck,
    without_namespaces,
)
from tests.support.ordinary_user import context_fixture as context_fixture
from tests.support.ordinary_user import nothing_stays_fixture as nothing_stays_fixture
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = pytest.mark.processes

IMAGE = "localhost/sqshforge-test-odd:1"
EPOCH = str(odd_root.TIME + 1_000_000)

DRIVERS = {
    "vfs": 'driver = "vfs"\n',
    "overlay": 'driver = "overlay"\n',
    "fuse-overlayfs": 'driver = "overlay"\n[storage.options.overlay]\n'
    'mount_program = "/usr/bin/fuse-overlayfs"\n',
}


# A folder.


@pytest.fixture(scope="module")
def tree(user: User) -> Path:
    """A folder of the user's with every oddity; closed to others, and partly to the user."""
    return user.take(odd_root.make(user.home / "tree"))


def test_a_folder_of_the_user_s_gives_the_bytes_that_root_gets(
    user: User, tree: Path, tmp_path: Path
) -> None:
    done = user.pack(f"rootfs:{tree}", "-o", "folder.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    output = user.home / "folder.sqsh"
    assert output.read_bytes() == by_root(f"rootfs:{tree}", tmp_path / "a.sqsh").read_bytes()
    assert (output.stat().st_uid, output.stat().st_mode & 0o777) == (UID, 0o644)
    found = odd_root.unpacked(output, tmp_path / "found")
    assert (found["data/file-000"].mode, found["dir-000"].mode) == (0o400, 0o700)
    assert "dir-000/inside" in found


@pytest.mark.parametrize("closed", ["etc/shadow", "var/secret"])
def test_what_the_user_may_not_read_is_named(closed: str, user: User) -> None:
    """A file or folder of root's in a folder of the user's."""
    tree = user.home / f"closed-{Path(closed).name}"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/shadow").write_text("root::\n")
    (tree / "var/secret").mkdir(parents=True)
    user.take(tree)
    os.chown(tree / closed, 0, 0)
    (tree / closed).chmod(0o700)
    done = user.pack(f"rootfs:{tree}", "-o", "closed.sqsh", "--profile", "fast")
    assert done.returncode == 1
    assert "error: this user may not read all of the image\n" in done.stderr
    assert f"where: /{closed} in it\n" in done.stderr and "fix:   pack as root" in done.stderr


@pytest.mark.parametrize("address", ["rootfs:tree", f"buildah://{IMAGE}"])
def test_a_machine_without_user_namespaces_is_one_clear_error(
    address: str, user: User, tree: Path
) -> None:
    with without_namespaces(user, *command(address, "-o", "a.sqsh")) as process:
        out, err = process.communicate("\n", timeout=300)
    assert (process.returncode, out) == (3, "")
    assert "user namespace" in err and "Traceback" not in err
    assert "fix:   pack as root; or as root: sysctl user.max_user_namespaces=" in err
    assert len(err.splitlines()) <= 6
    assert not list(user.home.glob("a.sqsh*"))


# Buildah.


@pytest.fixture(scope="module", params=DRIVERS)
def rootless(request: pytest.FixtureRequest, context: Path) -> Iterator[User]:
    """A user with the odd image in a buildah storage of one kind."""
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
    """What root gets from the same image, built by root."""
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
    found = odd_root.unpacked(output, tmp_path / "found")
    assert found == odd_root.unpacked(expected, tmp_path / "expected")
    assert output.read_bytes() == expected.read_bytes()
    assert (output.stat().st_uid, output.stat().st_mode & 0o777) == (UID, 0o644)
    assert working_containers(rootless) == []


def test_the_cache_of_bases_is_the_user_s_own(context: Path) -> None:
    """The kernel's overlay shows the layers; another change of /sqshforge needs only that."""
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
def test_a_packer_of_buildah_s_that_gets_a_signal(how: signal.Signals, user: User) -> None:
    """It is a single process, so the signal and the exit code are the packer's own."""
    set_storage(user, DRIVERS["vfs"])
    build(user, incompressible(user, how.name), "localhost/slow:1")
    struck(user, "buildah://localhost/slow:1", how)
    assert working_containers(user) == []


def test_a_user_without_ranges_of_ids_is_reported_how_to_get_them() -> None:
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
    assert "fix:   sudo apt-get install uidmap" in done.stderr


def test_an_image_that_the_user_does_not_have(rootless: User) -> None:
    done = rootless.pack("buildah://sqshforge-no-such", "-o", "b.sqsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "buildah has no image 'sqshforge-no-such'" in done.stderr
