"""What a launcher's nodes read ahead of an image while they start."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.squashfs import hot_range
from sqshforge.squashfs.hot_note import HotRange
from tests.support import containers, page_cache
from tests.support.launcher_shell import NOTHING, Shell

pytestmark = pytest.mark.processes

SIZE = 24 << 20
GIB = 1 << 30
COLD = 0.3


@pytest.fixture
def shell(tmp_path: Path, root: Path) -> Shell:
    return Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")


@pytest.fixture
def image() -> Iterator[Path]:
    """An image whose second half is hot; it lies on a disk, as a tmpfs is always in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        tree, path = Path(name, "tree"), Path(name, "a b.sqsh")
        tree.mkdir()
        for one, seed in (("cold", 1), ("hot", 2)):
            (tree / one).write_bytes(random.Random(seed).randbytes(SIZE))
        Programs().capture(["mksquashfs", tree, path, "-quiet", "-no-progress"])
        found = hot_range.locate(path, [b"hot"])
        assert found is not None and found.offset >= SIZE
        hot_range.note(path, found)
        page_cache.forget(path)
        yield path


def noted(image: Path) -> HotRange:
    found = hot_range.locate(image, [b"hot"])
    page_cache.forget(image)
    assert found is not None
    return found


def in_memory(image: Path, hot: HotRange) -> float:
    return page_cache.share(image, hot.offset, hot.length)


def functions(launcher: Path, *names: str) -> str:
    text = launcher.read_text()
    found = [
        re.search(rf"^{name}\(\) \{{.*?^\}}\n", text, re.DOTALL | re.MULTILINE) for name in names
    ]
    return "".join(one[0] for one in found if one)


def warm(shell: Shell, image: Path, free: int = 64 * GIB) -> None:
    """Call it as a node does that has `free` bytes of free memory."""
    script = functions(shell.launcher, "warm") + f'free_memory() {{ echo {free}; }}\nwarm "$1"\n'
    argv = ["bash", "-c", script, "warm", str(image)]
    subprocess.run(argv, env={"PATH": str(shell.programs)}, capture_output=True)


def test_the_range_and_no_more(shell: Shell, image: Path) -> None:
    hot = noted(image)
    assert in_memory(image, hot) < COLD
    warm(shell, image)
    assert in_memory(image, hot) == 1
    assert page_cache.share(image, 0, hot.offset) < 0.6  # the kernel's read-ahead at the tail


def test_no_more_than_half_of_the_free_memory(shell: Shell, image: Path) -> None:
    hot = noted(image)
    warm(shell, image, free=SIZE // 2)
    assert 0.2 < in_memory(image, hot) < 0.9
    page_cache.forget(image)
    warm(shell, image, free=0)
    assert in_memory(image, hot) < COLD


@pytest.mark.parametrize(
    "note",
    [
        pytest.param(b"", id="none"),
        pytest.param(hot_range.NOTE.pack(0, 1 << 60, hot_range.MARK), id="too long"),
        pytest.param(hot_range.NOTE.pack(1 << 63, 1 << 63, hot_range.MARK), id="too far"),
        pytest.param(hot_range.NOTE.pack(96, 0, hot_range.MARK), id="empty"),
    ],
)
def test_a_file_that_notes_nothing_or_nonsense(shell: Shell, image: Path, note: bytes) -> None:
    hot = noted(image)
    with image.open("r+b") as file:
        file.seek(-hot_range.NOTE.size, 2)
        file.write(note.ljust(hot_range.NOTE.size, b"\0"))
    page_cache.forget(image)
    warm(shell, image)
    assert in_memory(image, hot) < COLD


MACHINE = {"proc/meminfo": f"MemTotal: 7 kB\nMemAvailable:   {40 * GIB // 1024} kB\n"}
TWO = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/memory.max": "max\n",
    "sys/fs/cgroup/a/memory.current": f"{50 * GIB}\n",
    "sys/fs/cgroup/a/b/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/a/b/memory.high": f"{7 * GIB}\n",
    "sys/fs/cgroup/a/b/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/a/b/memory.stat": f"anon 7\nactive_file {2 * GIB}\ninactive_file {GIB}\n",
}
ONE = {
    "proc/self/cgroup": "4:cpu,cpuacct:/c\n3:memory:/a\n1:name=systemd:/\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{5 * GIB}\n",
    "sys/fs/cgroup/memory/a/memory.stat": f"active_file 7\ntotal_inactive_file {GIB}\n",
}
FULL = {**TWO, "sys/fs/cgroup/a/b/memory.current": f"{20 * GIB}\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param({"proc/self/cgroup": "0::/\n"}, 40 * GIB, id="machine"),
        pytest.param(TWO, (7 - 5 + 3) * GIB, id="cgroups of version 2"),
        pytest.param(ONE, 4 * GIB, id="cgroups of version 1"),
        pytest.param(FULL, 0, id="full"),
    ],
)
def test_memory_that_is_free(
    shell: Shell, tmp_path: Path, files: dict[str, str], free: int
) -> None:
    place = tmp_path / "machine"
    for name, text in {**MACHINE, **files}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    script = functions(shell.launcher, "free_memory")
    script = re.sub("/(?=proc/|sys/)", f"{place}/", script) + "free_memory\n"
    env = {"PATH": str(shell.programs)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == f"{free}\n"


def start_enroot(shell: Shell, image: Path, **env: str) -> None:
    """Run what a node does with the words that srun gets."""
    words = shell.srun(IMAGE=str(image))
    begin = next(n for n, word in enumerate(words) if word.endswith("/start_enroot"))
    page_cache.forget(image)
    state = {"PATH": str(shell.programs), "XDG_RUNTIME_DIR": str(shell.folder), "IMAGE": str(image)}
    subprocess.run(
        ["bash", shell.state / "start_enroot", shell.state / "enroot.conf", *words[begin + 2 :]],
        env={**state, **env},
        capture_output=True,  # waits until everything that may write has closed them
        check=True,
    )


def test_under_enroot(shell: Shell, image: Path) -> None:
    hot = noted(image)
    shell.enroot()
    start_enroot(shell, image, WARM="0")
    assert in_memory(image, hot) < COLD
    start_enroot(shell, image)
    assert containers.until(lambda: in_memory(image, hot) == 1)


def pyxis(shell: Shell, image: Path, **env: str) -> list[str]:
    """Return the words of the step beside the start, the last of which is the image."""
    shown = Path(f"{shell.called}.warm")
    shown.unlink(missing_ok=True)
    words = shell.srun(RUNTIME="pyxis", IMAGE=str(image), **env)
    assert any(word.startswith("--container-image=") for word in words)
    assert containers.until(lambda: shown.exists() and shown.read_text().endswith(f"{image}\n"))
    return shown.read_text().splitlines()


def test_under_pyxis_that_mounts_the_image(shell: Shell, image: Path) -> None:
    hot = noted(image)
    stack = shell.folder / "plugstack.conf"
    stack.write_text("required /usr/lib/slurm/spank_pyxis.so use_squashfuse=1\n")
    page_cache.forget(image)
    words = pyxis(shell, image, PLUGSTACK=str(stack))
    assert words[:5] == ["--immediate=60", "--nodes=2", "--ntasks=2", "bash", "-c"]
    assert containers.until(lambda: in_memory(image, hot) == 1)
    shell.help.write_text("  --overlap   Force steps to overlap each other on the CPUs\n")
    assert pyxis(shell, image, PLUGSTACK=str(stack))[0] == "--overlap"


def test_not_under_pyxis_where_that_is_off(shell: Shell, image: Path) -> None:
    noted(image)
    stack = shell.folder / "plugstack.conf"
    stack.write_text("required /usr/lib/slurm/spank_pyxis.so use_squashfuse=1\n")
    # By then, a step beside the start would have been seen.
    env = {"PLUGSTACK": str(stack), "MEANWHILE": "sleep 1"}
    shell.srun(RUNTIME="pyxis", IMAGE=str(image), WARM="0", **env)
    assert not Path(f"{shell.called}.warm").exists()


def test_not_under_pyxis_that_unpacks_it(shell: Shell) -> None:
    """In that case pyxis reads all of the file, from front to back."""
    shell.program(
        "unsquashfs",
        "#!/bin/bash\necho '-rw-r--r-- root/root 1234 2026-01-01 00:00 root/x'\n",
    )
    shown = Path(f"{shell.called}.warm")
    shell.srun(RUNTIME="pyxis", HOME=str(shell.folder))
    assert not shown.exists()


def test_a_step_that_fails_fails_nothing(shell: Shell) -> None:
    shell.image.write_bytes(NOTHING)
    shell.program("od", "#!/bin/bash\necho 48\n")
    for tool in ("tail", "dd"):
        shell.program(tool, "#!/bin/bash\nexit 7\n")
    code, said = shell.run(RUNTIME="pyxis")
    assert code == 0 and said.endswith("mamba_fsdp: done\n")
