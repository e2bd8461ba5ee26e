"""How a container ends: signals, exit codes, nothing left; and requests that are refused."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.run.start import run
from tests.support import containers, processes, tiny_root

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("usual_hangup")]

# What a training job does when asked to end: it saves, from a root that must still exist.
SAVES = """
for name in TERM INT USR1 USR2 HUP; do
    trap "cat /usr/file >> /out/$name; sleep 0.2; cat /usr/file >> /out/$name; exit 9" $name
done
touch /out/ready
while :; do sleep 0.05; done
"""
SAVED = "of the image\n" * 2


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    def change(root: Path) -> None:
        (root / "usr" / "file").write_text("of the image\n")

    return tiny_root.sqsh(images / "tiny", change=change)


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


@pytest.fixture(params=containers.FUSE)
def saving(
    request: pytest.FixtureRequest, tiny: Path, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A container that is ready to save its work in tmp_path at a signal."""
    argv = containers.argv_by(
        tiny, "sh", "-c", SAVES, mounts=[f"{tmp_path}:/out"], fuse=request.param
    )
    with containers.started(argv) as process:
        assert containers.until((tmp_path / "ready").exists)
        yield process


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "USR2", "HUP"])
def test_a_signal_to_the_one_process_reaches_the_command(
    saving: subprocess.Popen[bytes], tmp_path: Path, name: str
) -> None:
    saving.send_signal(signal.Signals[f"SIG{name}"])
    assert saving.wait(20) == 9
    assert (tmp_path / name).read_text() == SAVED


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_the_whole_group_lets_the_command_save(
    saving: subprocess.Popen[bytes], tmp_path: Path, name: str
) -> None:
    os.killpg(saving.pid, signal.Signals[f"SIG{name}"])
    assert saving.wait(20) == 9
    assert (tmp_path / name).read_text() == SAVED


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2", "HUP"])
def test_a_signal_to_every_process_lets_the_command_save(
    saving: subprocess.Popen[bytes], tmp_path: Path, name: str
) -> None:
    containers.signal_all(signal.Signals[f"SIG{name}"])
    assert saving.wait(20) == 9
    assert (tmp_path / name).read_text() == SAVED


def test_under_nohup_a_hangup_is_ignored_inside(tiny: Path, tmp_path: Path) -> None:
    argv = containers.argv_by(tiny, "sh", "-c", SAVES, mounts=[f"{tmp_path}:/out"])
    with containers.started(["nohup", *argv]) as process:
        assert containers.until((tmp_path / "ready").exists)
        containers.signal_all(signal.SIGHUP)
        process.terminate()
        assert process.wait(20) == 9
    assert (tmp_path / "TERM").read_text() == SAVED
    assert not (tmp_path / "HUP").exists()


def test_the_command_is_the_process_that_was_started(tiny: Path) -> None:
    """No process in between could pass on a signal of Slurm a second time."""
    argv = containers.argv(tiny, "--", "sleep", "60")
    with containers.started(argv) as process:
        assert containers.until(lambda: processes.command(process.pid) == "sleep 60")
        started = processes.having({containers.MARK: os.environ[containers.MARK]})
        beside = [pid for pid in started if pid != process.pid]
        assert process.pid not in [processes.parent(pid) for pid in beside]


def test_kill_9_ends_the_command_too(saving: subprocess.Popen[bytes]) -> None:
    saving.kill()
    saving.wait()
    # The fixture `nothing_stays` checks after every test that nothing is left.


def test_kill_9_while_it_is_being_set_up(tiny: Path) -> None:
    for moment in range(0, 100, 10):
        with containers.started(containers.argv_by(tiny, "true", fuse=True)) as process:
            containers.until(lambda: False, 0.1 + moment / 1000)
            process.kill()


def spoil(tiny: Path, folder: Path, kind: str) -> Path:
    """Make a file that cannot be started."""
    image = folder / "image.sqsh"
    whole = tiny.read_bytes()
    if kind == "folder":
        image.mkdir()
    elif kind != "missing":
        image.write_bytes(
            {"text": b"#!/bin/sh\n" * 99, "cut": whole[:-4096], "tiny": b"hsqs"}[kind]
        )
    return image


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("missing", "cannot be read: No such file"),
        ("folder", "cannot be read: Is a directory"),
        ("text", "not a squash file"),
        ("tiny", "not a squash file"),
        ("cut", "cut short: "),
    ],
)
def test_what_is_no_whole_sqsh_is_refused_with_one_message(
    tiny: Path, tmp_path: Path, kind: str, shown: str
) -> None:
    image = spoil(tiny, tmp_path, kind)
    done = Programs().attempt(containers.argv(image, "--", "true"))
    assert done.code == 2
    what, where, fix = done.err.splitlines()
    assert what.startswith("error: ")
    assert shown in what
    assert where == f"  where: {image}"
    assert fix.startswith("  fix: ")
    with pytest.raises(RequestError):
        run(image, ["true"])


def test_an_image_without_a_shell_is_reported_in_two_lines(images: Path) -> None:
    image = tiny_root.sqsh(images / "empty", change=lambda root: (root / "bin" / "sh").unlink())
    done = Programs().attempt(containers.argv(image, "--", "true"))
    assert done.code == 1
    assert len(done.err.splitlines()) == 2
    assert "the container cannot be set up: [Errno 2] No such file or directory: '/bin/sh'" in (
        done.err
    )


@pytest.mark.root
def test_root_without_the_right_to_mount_is_reported(tiny: Path) -> None:
    """As in a docker container: uid 0, but no CAP_SYS_ADMIN."""
    argv = ["setpriv", "--bounding-set", "-sys_admin", *containers.argv(tiny, "--", "true")]
    done = Programs().attempt(argv)
    assert done.code == 3
    assert "may not mount" in done.err
    assert "fix:   run with CAP_SYS_ADMIN" in done.err


@pytest.mark.root
def test_without_loop_devices_and_squashfuse_the_package_is_named(
    tiny: Path, tmp_path: Path
) -> None:
    for name in ("mount", "true", "unshare"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = Programs().attempt(
        containers.argv_by(tiny, "true", fuse=True), env={"PATH": str(tmp_path)}
    )
    assert done.code == 3, done.err
    assert "squashfuse is not installed" in done.err
    assert "fix:   apt-get install squashfuse" in done.err
