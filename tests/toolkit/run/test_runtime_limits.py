"""What a command inherits from the process and the mounts it starts with, as under enroot."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs, Result
from sqshforge.host.rootpath import unescape
from tests.support import containers, tiny_root

pytestmark = pytest.mark.processes

Start = Callable[..., Result]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    return tiny_root.sqsh(images / "tiny")


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


@pytest.fixture(params=containers.FUSE)
def start(request: pytest.FixtureRequest, tiny: Path) -> Start:
    """Runs a command in a container whose file is mounted by the kernel, or by squashfuse."""

    def run(*command: str, image: Path = tiny) -> Result:
        return Programs().attempt(containers.argv_by(image, *command, fuse=request.param))

    return run


def options(mountinfo: str) -> dict[str, set[str]]:
    """Return the options of each mount by mount point; of several in one place, the topmost's."""
    fields = [line.split(" ") for line in mountinfo.splitlines()]
    return {unescape(one[4]): set(one[5].split(",")) for one in fields}


def of_sys(mountinfo: str) -> dict[str, set[str]]:
    return {place: one for place, one in options(mountinfo).items() if place.startswith("/sys")}


def test_a_command_may_have_as_many_words_as_the_kernel_takes(start: Start) -> None:
    """A shell's `*.txt` may give more in total than the 128 KiB that one word may have."""
    words = [f"/data/shard-{number:07}.txt" for number in range(20_000)]
    done = start("sh", "-c", "echo $#", "sh", *words)
    assert (done.code, done.out) == (0, "20000\n"), done.err


def test_no_program_gives_the_command_more_rights(start: Start) -> None:
    assert "\nNoNewPrivs:\t1\n" in start("cat", "/proc/self/status").out


def test_the_image_s_devices_and_setuid_programs_have_no_effect(start: Start) -> None:
    mounts = options(start("cat", "/proc/self/mountinfo").out)
    assert {"nosuid", "nodev", "rw"} <= mounts["/"]
    assert {"nosuid", "nodev", "rw"} <= mounts["/tmp"]


def test_sys_is_read_only_all_the_way_down_and_the_host_s_stays(start: Start) -> None:
    before = of_sys(Path("/proc/self/mountinfo").read_text())
    done = start("sh", "-c", "cat /proc/self/mountinfo; touch /sys/fs/cgroup/new")
    assert done.code != 0 and "Read-only file system" in done.err
    found = of_sys(done.out)
    assert {place: one - {"ro"} for place, one in found.items()} == {
        place: one - {"rw", "ro"} for place, one in before.items()
    }
    assert [place for place, one in found.items() if "ro" not in one] == []
    assert of_sys(Path("/proc/self/mountinfo").read_text()) == before
    assert "rw" in before["/sys"]


def test_shared_memory_and_devices_of_the_host_can_be_written_to(start: Start) -> None:
    shared = Path("/dev/shm") / f"sqshforge-test-{uuid.uuid4().hex}"
    shared.touch()
    try:
        done = start("sh", "-c", f"echo inside > {shared}; echo x > /dev/null")
        assert (done.code, shared.read_text()) == (0, "inside\n"), done.err
    finally:
        shared.unlink()


@pytest.mark.parametrize("number", [None, "", "x", "-1", "0", "9" * 20])
def test_descriptors_above_2_are_closed(
    number: str | None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the caller has open, and whatever a process manager's socket is said to be."""
    if number is not None:
        monkeypatch.setenv("PMI_FD", number)
    (tmp_path / "open").touch()
    with (tmp_path / "open").open() as file:
        done = subprocess.run(
            containers.argv(tiny, "--", "ls", "-l", "/proc/self/fd"),
            pass_fds=[file.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stdout
    names = [line.partition(" -> ")[0].split()[-1] for line in done.stdout.splitlines()[1:]]
    assert names == ["0", "1", "2", "3"], done.stdout  # the last one is the folder that ls reads


@pytest.mark.parametrize(
    ("closed", "numbers"),
    [("<&-", "0"), (">&-", "1"), ("2>&-", "2"), ("<&- >&- 2>&-", "012")],
)
def test_streams_that_the_caller_has_closed_lead_to_nowhere(
    closed: str, numbers: str, tiny: Path, tmp_path: Path
) -> None:
    script = "(ls -l /proc/$$/fd > /out/seen); exit 7"
    argv = containers.argv(tiny, "--mount", f"{tmp_path}:/out", "--", "sh", "-c", script)
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *argv], timeout=300, check=False)
    assert done.returncode == 7
    seen = (tmp_path / "seen").read_text()
    for number in numbers:
        assert f" {number} -> /dev/null" in seen


@pytest.mark.parametrize(
    ("settings", "umask"),
    [
        (None, "0027"),
        ("", "0027"),
        ("# UMASK 077\nUMASK_OF 077\n", "0027"),
        ("UMASK\t\t077\n", "0077"),
        ("UMASK 022 # as useradd\nUMASK=007\n", "0007"),
        ("UMASK 18\n", "0022"),  # a number without a leading 0 is decimal, login.defs(5)
        ("UMASK u=rwx\n", "0027"),
        ("UMASK 99999999999999999999999\n", "0027"),
    ],
)
def test_the_umask_is_that_of_the_image_s_login_defs(
    settings: str | None, umask: str, images: Path, tmp_path: Path
) -> None:
    def change(root: Path) -> None:
        if settings is not None:
            (root / "etc" / "login.defs").write_text(settings)

    image = tiny_root.sqsh(tmp_path / "umask", change=change)
    done = subprocess.run(
        containers.argv(image, "--", "sh", "-c", "umask"),
        umask=0o027,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{umask}\n"), done.stderr


def skeleton(root: Path) -> None:
    """Write what a distribution has there, and what must not make a start fail."""
    skel = root / "etc" / "skel"
    (skel / ".config").mkdir(parents=True, mode=0o700)
    (skel / ".profile").write_text("export SAID=by-profile\n")
    (skel / ".config" / "one").write_text("1\n")
    (skel / ".config" / "one").chmod(0o600)
    (skel / "link").symlink_to("/etc/passwd")
    (skel / "nowhere").symlink_to("/nowhere")
    os.mkfifo(skel / "pipe")


def test_a_new_home_folder_has_what_etc_skel_has(
    start: Start, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny_root.sqsh(images / "skel", change=skeleton)
    monkeypatch.setenv("HOME", "/home/new one")
    script = "ls -A ~ ~/.config; cat ~/.config/one; stat -c %a ~/.config ~/.config/one; echo $SAID"
    done = start("sh", "-c", script, image=image)
    assert done.code == 0, done.err
    assert done.out.split("\n") == [
        "/home/new one:",
        *(".config", ".profile", "link", "nowhere", ""),
        "/home/new one/.config:",
        *("one", "1", "700", "600", "by-profile", ""),
    ]
    monkeypatch.setenv("HOME", "/root")  # it exists in the image
    assert start("ls", "-A", "/root", image=image).out == ""


@pytest.mark.parametrize("home", ["/etc/skel", "/etc/skel/.config/in", "/etc/skel/new/in"])
def test_a_home_folder_in_etc_skel_is_just_made(
    home: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny_root.sqsh(tmp_path / "skel", change=skeleton)
    monkeypatch.setenv("HOME", home)
    done = Programs().attempt(containers.argv(image, "--", "sh", "-c", "cd ~ && pwd"))
    assert (done.code, done.out) == (0, f"{home}\n"), done.err
