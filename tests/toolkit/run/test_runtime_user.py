"""The runtime as an ordinary user: user namespaces, squashfuse and fuse-overlayfs.

Uses the command that an image carries, which test_zipapp.py compares with `sqshforge run`.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.image.enroot import ImageConfig
from sqshforge.run import zipapp
from tests.support import containers, processes, tiny_root

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("usual_hangup")]

# If root runs the tests, nobody's ids; otherwise the caller's own.
UID, GID = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())

# A mount namespace where /dev/fuse has the mode that udev gives it, whatever this machine's has; in
# it, a user without rights or groups.
AS_USER = """
mount -t tmpfs tmpfs /mnt && mknod -m $0 /mnt/fuse c 10 229 && mount --bind /mnt/fuse /dev/fuse &&
umount --lazy /mnt && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""

Argv = Callable[..., list[str]]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user can read; pytest's own ones are for one user."""
    folder = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tiny(place: Path) -> Path:
    def change(root: Path) -> None:
        (root / "usr" / "file").write_text("of the image\n")
        (root / "usr" / "private").write_text("root's own\n")
        (root / "usr" / "private").chmod(0o600)

    return tiny_root.sqsh(place / "tiny", ImageConfig(reference="t", volumes=("/scratch",)), change)


@pytest.fixture(scope="module")
def carried(place: Path) -> Path:
    path = place / zipapp.NAME
    path.write_bytes(zipapp.runtime())
    return path


@pytest.fixture
def data(place: Path) -> Iterator[Path]:
    """A folder that belongs to the user."""
    folder = place / "data"
    folder.mkdir()
    os.chown(folder, UID, GID)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_stays(place: Path) -> Iterator[None]:
    with containers.watched(place):
        yield


@pytest.fixture
def argv(tiny: Path, carried: Path) -> Argv:
    def words(
        *command: str, mounts: tuple[str, ...] = (), fuse_mode: str = "0666", image: Path = tiny
    ) -> list[str]:
        become = ["unshare", "--mount", "sh", "-c", AS_USER, fuse_mode]
        enter = become if os.geteuid() == 0 else []
        start = ["/usr/bin/env", "HOME=/home/u", "/usr/bin/python3", "-I", "-S", str(carried)]
        bound = [f"--mount={one}" for one in mounts]
        return [*enter, *start, *bound, str(image), "--", *command]

    return words


def test_the_user_is_the_same_inside_and_known_by_a_name(argv: Argv, data: Path) -> None:
    script = "id -u; id -g; id -un; id -gn; echo ~; touch /out/file; stat -c %u /out/file"
    done = Programs().attempt(argv("sh", "-c", script, mounts=(f"{data}:/out",)))
    assert done.code == 0, done.err
    user, group = pwd.getpwuid(UID).pw_name, grp.getgrgid(GID).gr_name
    assert done.out.split() == [str(UID), str(GID), user, group, "/home/u", str(UID)]
    assert (data / "file").stat().st_uid == UID


def test_all_of_the_root_is_the_user_s_and_is_forgotten(argv: Argv, tiny: Path) -> None:
    before = hashlib.sha256(tiny.read_bytes()).hexdigest()
    script = "cat /usr/private; echo new > /usr/file; touch /here /tmp/t /scratch/s; cat /usr/file"
    done = Programs().attempt(argv("sh", "-c", script))
    assert (done.code, done.out) == (0, "root's own\nnew\n"), done.err
    assert Programs().attempt(argv("ls", "/here")).code != 0
    assert hashlib.sha256(tiny.read_bytes()).hexdigest() == before


@pytest.mark.root
def test_an_image_of_several_owners_is_the_user_s_too(argv: Argv, place: Path) -> None:
    """The kernel's overlay cannot change others' files; fuse-overlayfs makes all of them ours."""

    def change(root: Path) -> None:
        (root / "usr" / "other").write_text("another's\n")
        os.chown(root / "usr" / "other", 1234, 1234)

    image = tiny_root.sqsh(place / "owners", change=change, owners=())
    script = "stat -c %u /usr/other; echo more >> /usr/other; cat /usr/other"
    done = Programs().attempt(argv("sh", "-c", script, image=image))
    assert (done.code, done.out) == (0, f"{UID}\nanother's\nmore\n"), done.err


def test_no_more_rights_sys_read_only_and_a_home_folder_as_in_etc_skel(
    argv: Argv, place: Path
) -> None:
    def change(root: Path) -> None:
        (root / "etc" / "skel").mkdir()
        (root / "etc" / "skel" / ".profile").write_text("export SAID=by-profile\n")
        (root / "etc" / "skel" / ".profile").chmod(0o600)

    image = tiny_root.sqsh(place / "skel", change=change)
    script = "echo $SAID; touch ~/new; stat -c %u ~ ~/.profile; cat /proc/self/status /proc/mounts"
    done = Programs().attempt(argv("sh", "-c", script, image=image))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:3] == ["by-profile", str(UID), str(UID)]
    assert "NoNewPrivs:\t1" in lines
    mounts = [line.split(" ") for line in lines if line.count(" ") == 5]
    options = {one[1]: one[3].split(",") for one in mounts}
    assert {"nosuid", "nodev"} <= set(options["/"]) and {"nosuid", "nodev"} <= set(options["/tmp"])
    of_sys = {point: one for point, one in options.items() if point.startswith("/sys")}
    assert of_sys and [point for point, one in of_sys.items() if "ro" not in one] == []


@pytest.mark.root
def test_what_of_sys_a_user_cannot_reach_does_not_prevent_a_start(argv: Argv, place: Path) -> None:
    """For example tracefs in debugfs, in a folder of root's."""
    code = """
    mount -t tmpfs -o mode=0700 tmpfs /sys/kernel/debug && mkdir /sys/kernel/debug/tracing &&
    mount -t tmpfs tmpfs /sys/kernel/debug/tracing && exec "$@"
    """
    done = Programs().attempt(["unshare", "--mount", "sh", "-c", code, "sh", *argv("id", "-u")])
    assert (done.code, done.out) == (0, f"{UID}\n"), done.err


@pytest.mark.parametrize(
    ("user", "umask"),
    [
        (f"me:x:{UID}:{UID}::/:/bin/sh", "0002"),
        (f"me:x:{UID}:{UID}::/:/bin/sh\nme:x:{UID + 1}:", "0002"),
        (f"other:x:{UID}:{UID}::/:/bin/sh", "0022"),
        (f"me:x:{UID}:0::/:/bin/sh", "0022"),
    ],
)
def test_the_umask_of_a_user_with_a_group_of_its_own(
    argv: Argv, place: Path, user: str, umask: str
) -> None:
    def change(root: Path) -> None:
        (root / "etc" / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\n{user}\n")
        (root / "etc" / "group").write_text(f"root:x:0:\nme:x:{UID}:\n")
        (root / "etc" / "login.defs").write_text("UMASK 022\nUSERGROUPS_ENAB yes\n")

    image = tiny_root.sqsh(place / f"umask-{uuid.uuid4().hex}", change=change)
    done = Programs().attempt(argv("sh", "-c", "umask", image=image))
    assert (done.code, done.out) == (0, f"{umask}\n"), done.err


def test_exit_codes_and_deaths_by_a_signal_come_back(argv: Argv) -> None:
    assert Programs().attempt(argv("sh", "-c", "exit 7")).code == 7
    assert Programs().attempt(argv("sh", "-c", "kill -TERM $$")).code == -signal.SIGTERM
    assert Programs().attempt(argv("no-such-program")).code == 127


@pytest.mark.root
def test_read_only_mounts_keep_what_the_host_has_set(argv: Argv, place: Path) -> None:
    """A user namespace must not clear nosuid, nodev or noexec of a mount that it inherits."""
    source = place / "strict"
    source.mkdir()
    Programs().capture(["mount", "-t", "tmpfs", "-o", "nosuid,nodev,noexec", "tmpfs", source])
    try:
        (source / "file").write_text("of the host\n")
        script = "cat /in/file; echo x > /in/new"
        done = Programs().attempt(argv("sh", "-c", script, mounts=(f"{source}:/in:ro",)))
    finally:
        Programs().capture(["umount", source])
    assert done.out == "of the host\n"
    assert "Read-only file system" in done.err


@pytest.mark.parametrize("name", ["TERM", "USR1", "HUP"])
def test_a_signal_to_every_process_lets_the_command_save(argv: Argv, data: Path, name: str) -> None:
    script = f"""
    trap "cat /usr/file > /out/saved; sleep 0.2; cat /usr/file >> /out/saved; exit 9" {name}
    touch /out/ready
    while :; do sleep 0.05; done
    """
    with containers.started(argv("sh", "-c", script, mounts=(f"{data}:/out",))) as process:
        assert containers.until((data / "ready").exists)
        started = processes.having({containers.MARK: os.environ[containers.MARK]})
        names = [Path(processes.command(pid).split(" ")[0]).name for pid in started]
        assert any(name.startswith("squashfuse") for name in names)
        containers.signal_all(signal.Signals[f"SIG{name}"])
        assert process.wait(20) == 9
    assert (data / "saved").read_text() == "of the image\n" * 2


def test_kill_9_leaves_nothing(argv: Argv, data: Path) -> None:
    script = "touch /out/ready; exec sleep 60"
    with containers.started(argv("sh", "-c", script, mounts=(f"{data}:/out",))) as process:
        assert containers.until((data / "ready").exists)
        process.kill()
        process.wait()
    # The fixture checks after every test that nothing is left.


@pytest.mark.root
def test_without_the_right_to_use_fuse_the_way_to_it_is_reported(argv: Argv) -> None:
    done = Programs().attempt(argv("true", fuse_mode="0600"))
    assert done.code == 3
    assert "/dev/fuse is not there or not for ordinary users" in done.err
    assert "fix:   as root: modprobe fuse && chmod 0666 /dev/fuse" in done.err
