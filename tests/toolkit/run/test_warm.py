"""While a container starts, the hot range of its file is read into memory, once and only there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.run import warm
from sqshforge.run.start import MAGIC
from sqshforge.squashfs import hot_range
from sqshforge.squashfs.hot_note import HotRange
from tests.support import containers, enroots, page_cache, processes, tiny_root
from tests.support.cgroups import cgroup

pytestmark = pytest.mark.processes

SIZE = 48 << 20  # bytes of the hot file
SLEEP = ["sleep", "100"]
COLD = 0.3  # share of the range; a start by itself reads less


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # a disk: a tmpfs is always in memory
        yield Path(name)


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    def add(root: Path) -> None:
        (root / "hot").write_bytes(random.Random(1).randbytes(SIZE))

    return tiny_root.sqsh(images / "tiny", change=add)


@pytest.fixture(scope="module")
def hot(tiny: Path) -> HotRange:
    found = hot_range.locate(tiny, [b"hot"])
    assert found is not None and found.length >= SIZE
    hot_range.note(tiny, found)
    return found


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


def in_memory(image: Path, hot: HotRange) -> float:
    return page_cache.share(image, hot.offset, hot.length)


def warmed(image: Path, hot: HotRange, argv: list[str]) -> bool:
    """Tell whether a sleeping container gets its range into memory."""
    page_cache.forget(image)
    assert in_memory(image, hot) < COLD
    with containers.started([*argv, *SLEEP]) as process:
        # Wait for its command, too: if enroot is killed before that, it leaves a stopped shell.
        containers.until(
            lambda: (
                process.poll() is not None or (in_memory(image, hot) == 1 and sleeps(process.pid))
            )
        )
        return in_memory(image, hot) == 1 and process.poll() is None


def sleeps(container: int) -> bool:
    """Tell whether a container's command runs."""
    below = [container, *processes.descendants(container)]
    return any(processes.command(pid).split() == SLEEP for pid in below)


def read_by(image: Path, hot: HotRange, argv: list[str]) -> float:
    """Return the share of the range in memory a second after a container has started."""
    page_cache.forget(image)
    done = subprocess.run([*argv, "sh", "-c", "sleep 1; echo done"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return in_memory(image, hot)


@pytest.mark.parametrize("fuse", containers.FUSE)
def test_the_range_is_in_memory_and_none_of_it_where_that_is_off(
    tiny: Path, hot: HotRange, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = containers.argv_by(tiny, fuse=fuse)
    assert warmed(tiny, hot, argv)
    monkeypatch.setenv("WARM", "0")
    assert read_by(tiny, hot, argv) < COLD


def test_under_enroot(
    tiny: Path, hot: HotRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with enroots.patched(enroots.stand_in(tmp_path)):
        # The stand-in starts one of our containers, which would itself read ahead.
        assert warmed(tiny, hot, enroots.argv(tiny, "--env=WARM=0", "--"))
        monkeypatch.setenv("WARM", "0")
        assert read_by(tiny, hot, enroots.argv(tiny, "--")) < COLD


def test_one_of_many_reads(tiny: Path, hot: HotRange) -> None:
    """The others start all the same."""
    with tiny.open("rb") as file:
        with warm.alone(file) as first, warm.alone(file) as second:
            assert first and not second
            assert read_by(tiny, hot, containers.argv(tiny, "--")) < COLD
        with warm.alone(file) as again:
            assert again
    assert warmed(tiny, hot, containers.argv(tiny, "--"))


def test_a_killed_reader_is_in_nobody_s_way(tiny: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from sqshforge.run import warm\n"
        "with open(sys.argv[1], 'rb') as file, warm.alone(file) as is_ours:\n"
        "    print(is_ours, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, tiny], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"True\n"
        with tiny.open("rb") as file:
            with warm.alone(file) as is_ours:
                assert not is_ours
            reader.kill()
            reader.wait()
            with warm.alone(file) as is_ours:
                assert is_ours


def test_no_more_than_half_of_the_free_memory(
    tiny: Path, hot: HotRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_cache.forget(tiny)
    monkeypatch.setattr(warm, "free_memory", lambda: 16 << 20)
    warm.warm(tiny, goes_on=lambda: True)
    begin = HotRange(hot.offset, 8 << 20)
    ahead = page_cache.read_ahead()  # what the kernel reads ahead beyond that
    assert in_memory(tiny, begin) == 1
    assert in_memory(tiny, hot) <= (begin.length + ahead) / hot.length + 0.01
    page_cache.forget(tiny)
    monkeypatch.setattr(warm, "free_memory", lambda: 0)
    warm.warm(tiny, goes_on=lambda: True)
    assert in_memory(tiny, hot) < COLD


@pytest.mark.root
def test_a_small_cgroup_is_not_filled(tiny: Path, hot: HotRange) -> None:
    page_cache.forget(tiny)
    with cgroup("memory", {"memory.max": str(32 << 20)}) as group:
        code = (
            "import sys; from pathlib import Path; from sqshforge.run import warm\n"
            "warm.warm(Path(sys.argv[1]), goes_on=lambda: True)"
        )
        Programs().capture([*group.starting(), sys.executable, "-c", code, str(tiny)])
        assert group.out_of_memory() == 0
    assert 0.1 < in_memory(tiny, hot) < 0.9


def test_it_ends_with_the_start(tiny: Path, hot: HotRange) -> None:
    page_cache.forget(tiny)
    answers = iter([True, False])
    warm.warm(tiny, goes_on=lambda: next(answers))
    assert in_memory(tiny, hot) < 0.6


def test_nothing_of_it_is_the_command_s(tiny: Path, hot: HotRange) -> None:
    """Neither a child, which a shell would wait for, nor an open pipe, nor any output."""
    script = 'read children < /proc/$$/task/$$/children; echo "children: $children"'
    done = Programs().attempt(containers.argv_by(tiny, "sh", "-c", script))
    assert (done.code, done.out, done.err) == (0, "children: \n", "")


def test_where_a_caller_waits_for_no_child(tiny: Path) -> None:
    """An ignored SIGCHLD is inherited."""
    ignored = subprocess.run(
        containers.argv(tiny, "--", "sh", "-c", "exit 7"),
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
    )
    assert (ignored.returncode, ignored.stderr) == (7, b"")


@pytest.mark.parametrize(
    "note",
    [
        pytest.param(b"", id="none"),
        pytest.param(hot_range.NOTE.pack(0, 1 << 60, hot_range.MARK), id="too long"),
        pytest.param(hot_range.NOTE.pack(1 << 63, 1 << 63, hot_range.MARK), id="too far"),
        pytest.param(hot_range.NOTE.pack(96, 0, hot_range.MARK), id="empty"),
    ],
)
def test_a_file_that_notes_nothing_or_nonsense(
    tiny: Path, hot: HotRange, images: Path, note: bytes
) -> None:
    other = Path(shutil.copy(tiny, images / "other.sqsh"))
    with other.open("r+b") as file:
        file.seek(-hot_range.NOTE.size, os.SEEK_END)
        file.write(note.ljust(hot_range.NOTE.size, b"\0"))
    assert read_by(other, hot, containers.argv(other, "--")) < COLD


def test_what_cannot_be_read_delays_nothing(tmp_path: Path) -> None:
    """The start itself reports what is wrong with the file."""
    warm.in_background(tmp_path / "none.sqsh")
    (tmp_path / "short.sqsh").write_bytes(MAGIC)
    warm.in_background(tmp_path / "short.sqsh")
    done = Programs().attempt(containers.argv(tmp_path / "none.sqsh", "--", "true"))
    assert done.code == 2 and "the file cannot be read" in done.err
