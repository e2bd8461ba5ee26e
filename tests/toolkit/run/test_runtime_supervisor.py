"""The processes beside a container: the command does not see them, and they leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from tests.support import containers, mounts, processes, tiny_root

pytestmark = pytest.mark.processes

FUSE = pytest.mark.parametrize("fuse", containers.FUSE)


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


@FUSE
def test_the_command_has_no_children_that_it_did_not_start(tiny: Path, fuse: bool) -> None:
    """A program that waits for all of its children, or kills them all, must not find a server."""
    script = 'read -r mine < /proc/$$/task/$$/children; echo "<$mine>"'
    done = Programs().attempt(containers.argv_by(tiny, "sh", "-c", script, fuse=fuse))
    assert done.out == "<>\n"


@FUSE
@pytest.mark.parametrize("how", ["exit 3", "kill -9 $$"])
def test_what_the_command_leaves_running_ends_with_it(
    tiny: Path, tmp_path: Path, fuse: bool, how: str
) -> None:
    script = f"sleep 600 & (sleep 600 & touch /out/ready; sleep 600) & sleep 0.3; {how}"
    argv = containers.argv_by(tiny, "sh", "-c", script, mounts=[f"{tmp_path}:/out"], fuse=fuse)
    with containers.started(argv) as process:
        assert process.wait(20) in (3, -signal.SIGKILL)
    assert (tmp_path / "ready").exists()
    # The fixture `nothing_stays` checks after every test that none of them is left.


@FUSE
def test_kill_9_ends_all_that_the_command_has_started(
    tiny: Path, tmp_path: Path, fuse: bool
) -> None:
    script = "sleep 600 & touch /out/ready; sleep 600"
    argv = containers.argv_by(tiny, "sh", "-c", script, mounts=[f"{tmp_path}:/out"], fuse=fuse)
    with containers.started(argv) as process:
        assert containers.until((tmp_path / "ready").exists)
        process.kill()
        process.wait()
        mark = {containers.MARK: os.environ[containers.MARK]}
        assert containers.until(lambda: not processes.having(mark), 120)


@FUSE
def test_no_folder_stays_in_tmp_wherever_the_start_is_killed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuse: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    argv = containers.argv_by(tiny, "sleep", "600", fuse=fuse)
    for moment in range(0, 200, 10):
        with containers.started(argv) as process:
            containers.until(lambda: False, moment / 1000)
            process.kill()
    assert containers.until(lambda: not list(tmp_path.iterdir()), 120)


@FUSE
def test_the_reader_of_a_pipe_sees_its_end_with_the_command(tiny: Path, fuse: bool) -> None:
    argv = containers.argv_by(tiny, "sh", "-c", "sleep 600 & echo said", fuse=fuse)
    assert subprocess.run(argv, capture_output=True, timeout=120, check=True).stdout == b"said\n"


@FUSE
def test_a_process_manager_s_socket_is_handed_on(
    tiny: Path, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives one to each rank of a step with PMI-2, and its number in PMI_FD."""
    reader, writer = os.pipe()
    monkeypatch.setenv("PMI_FD", str(writer))
    argv = containers.argv_by(tiny, "sh", "-c", f"echo said > /dev/fd/{writer}", fuse=fuse)
    with os.fdopen(reader) as said:
        subprocess.run(argv, pass_fds=[writer], timeout=120, check=True)
        os.close(writer)
        assert said.read() == "said\n"


@FUSE
def test_a_strict_umask_is_the_command_s_and_not_the_root_s(tiny: Path, fuse: bool) -> None:
    script = "umask; stat -c %a / /etc/hosts /etc/passwd /tmp /proc"
    argv = containers.argv_by(tiny, "sh", "-c", script, fuse=fuse)
    done = subprocess.run(argv, umask=0o077, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0077", "755", "644", "644", "1777", "555"]


def test_what_the_host_mounts_later_shows_in_a_mount(tiny: Path, tmp_path: Path) -> None:
    """For example, an automounter mounts a home folder when a job first looks into it."""
    (tmp_path / "in" / "home").mkdir(parents=True)
    script = "touch /in/ready; while [ ! -e /in/home/late ]; do sleep 0.02; done"
    start = containers.argv_by(tiny, "sh", "-c", script, mounts=[f"{tmp_path}/in:/in"])
    host = """
    mount --bind "$0" "$0" && mount --make-shared "$0" || exit 9
    "$@" & while [ ! -e "$0/ready" ]; do sleep 0.02; done
    mount -t tmpfs tmpfs "$0/home" && touch "$0/home/late" && wait $!
    """
    argv = [*mounts.mounting(), "sh", "-c", host, f"{tmp_path}/in", *start]
    assert Programs().attempt(argv, timeout=120).code == 0


@pytest.mark.parametrize("sound", [0, 96], ids=["nothing", "superblock"])
def test_a_damaged_file_is_reported_and_leaves_nothing(
    tiny: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: int
) -> None:
    """All zeros except for the mark and the length, or the first block, which a server mounts."""
    whole = tiny.read_bytes()
    broken = images / "broken.sqsh"
    head = whole[:sound] or b"hsqs" + bytes(36) + len(whole).to_bytes(8, "little")
    broken.write_bytes(head.ljust(len(whole), b"\0"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = Programs().attempt(containers.argv_by(broken, "true", fuse=True))
    assert done.code == 1
    assert done.err.startswith("error: the container cannot be set up: ")
    assert "squashfuse" in done.err or "root folder cannot be read" in done.err
    assert done.err.splitlines()[-1] == f"  where: {broken}"
    assert containers.until(lambda: not list(tmp_path.iterdir()), 120)
