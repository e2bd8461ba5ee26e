"""The resources of this process: from handmade files of all kinds of cgroups, and a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sqshforge.host import cgroups, resources
from tests.support.cgroups import Cgroup, cgroup

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
NOTHING: dict[str, str] = {}


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has 16 processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def lay(root: Path, mounts: str | list[str], groups: str, files: dict[str, str]) -> Path:
    """Make a machine of 64 GiB with these mounts, this process's cgroups, and files of cgroups."""
    lines = [mounts] if isinstance(mounts, str) else mounts
    contents = {
        "proc/meminfo": f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {40 * GIB // 1024} kB\n",
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + "\n".join(lines) + "\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def found(root: Path, environment: dict[str, str] = NOTHING) -> tuple[int, int | None]:
    return resources.processors(root, environment), resources.memory(root, environment)


def test_a_machine_without_cgroups_gives_all_it_has(tmp_path: Path) -> None:
    assert found(lay(tmp_path / "machine", [], "", {})) == (16, 64 * GIB)
    assert found(tmp_path / "nothing at all") == (16, None)


@pytest.mark.parametrize(
    ("quota", "processors"),
    [("max 100000", 16), ("50000 100000", 1), ("150000 100000", 1), ("800000 100000", 8), ("", 16)],
)
def test_a_quota_is_rounded_down_to_at_least_one(
    tmp_path: Path, quota: str, processors: int
) -> None:
    root = lay(tmp_path, V2, "0::/job\n", {"job/cpu.max": f"{quota}\n"})
    assert resources.processors(root, NOTHING) == processors


def test_the_least_on_the_whole_path_counts(tmp_path: Path) -> None:
    files = {
        "slurm/cpu.max": "400000 100000\n",
        "slurm/memory.max": f"{8 * GIB}\n",
        "slurm/job/cpu.max": "max 100000\n",
        "slurm/job/memory.max": "max\n",
        "slurm/job/memory.high": "max\n",
        "slurm/job/step/cpu.max": "1200000 100000\n",
        "slurm/job/step/memory.max": f"{16 * GIB}\n",
        "slurm/other/cpu.max": "100000 100000\n",
        "slurm/other/memory.max": "4096\n",
    }
    assert found(lay(tmp_path, V2, "0::/slurm/job/step\n", files)) == (4, 8 * GIB)


def test_memory_above_which_a_group_is_slowed_down_is_a_limit(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{8 * GIB}\n", "a/memory.high": f"{6 * GIB}\n"}
    assert resources.memory(lay(tmp_path, V2, "0::/a\n", files), NOTHING) == 6 * GIB


def test_memory_that_is_free(tmp_path: Path) -> None:
    """It is the least of what the machine has and the limits leave, not counting the page cache."""
    assert cgroups.free_memory(lay(tmp_path / "machine", [], "", {})) == 40 * GIB
    assert cgroups.free_memory(tmp_path / "nothing at all") == 0
    files = {
        "a/memory.max": "max\n",
        "a/memory.current": f"{50 * GIB}\n",
        "a/b/memory.max": f"{8 * GIB}\n",
        "a/b/memory.high": f"{7 * GIB}\n",
        "a/b/memory.current": f"{5 * GIB}\n",
        "a/b/memory.stat": f"anon 7\nactive_file {2 * GIB}\ninactive_file {GIB}\nfile 7\n",
    }
    root = lay(tmp_path / "two", V2, "0::/a/b\n", files)
    assert cgroups.free_memory(root) == (7 - 5 + 3) * GIB
    (root / "sys/fs/cgroup/a/b/memory.stat").write_text("")
    (root / "sys/fs/cgroup/a/b/memory.current").write_text(f"{9 * GIB}\n")
    assert cgroups.free_memory(root) == 0


def test_memory_that_is_free_in_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
        "memory/a/memory.usage_in_bytes": f"{5 * GIB}\n",
        "memory/a/memory.stat": f"active_file 7\ntotal_active_file 0\ntotal_inactive_file {GIB}\n",
    }
    assert cgroups.free_memory(lay(tmp_path, MEMORY, "3:memory:/a\n", files)) == 4 * GIB


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/docker/c/cpu.cfs_quota_us": "300000\n",
        "cpu,cpuacct/docker/c/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/docker/m/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/docker/c/memory.limit_in_bytes": f"{1 * GIB}\n",
    }
    groups = "4:cpuset:/x\n3:memory:/docker/m\n2:cpu,cpuacct:/docker/c\n1:name=systemd:/\n"
    assert found(lay(tmp_path, [CPU, MEMORY], groups, files)) == (3, 2 * GIB)


def test_version_1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "9223372036854771712\n"}
    root = lay(tmp_path, MEMORY, "3:memory:/\n", files)
    (root / "proc/meminfo").unlink()
    assert resources.memory(root, NOTHING) is None


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files = {
        "memory/a/memory.limit_in_bytes": f"{3 * GIB}\n",
        "unified/b/cpu.max": "200000 100000\n",
    }
    root = lay(tmp_path, [MEMORY, unified], "4:memory:/a\n0::/b\n", files)
    assert found(root) == (2, 3 * GIB)


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    """With version 1 and no namespace, only one folder is mounted, but the path is the host's."""
    mount = MEMORY.replace(" / /sys", " /docker/c /sys")
    files = {"memory/memory.limit_in_bytes": "4096\n", "memory/s/memory.limit_in_bytes": "2048\n"}
    groups = "3:memory:/docker/c/s\n"
    assert resources.memory(lay(tmp_path / "1", mount, groups, files), NOTHING) == 2048
    groups = "3:memory:/docker/c\n"
    assert resources.memory(lay(tmp_path / "2", mount, groups, files), NOTHING) == 4096
    groups = "3:memory:/docker/another\n"
    assert resources.memory(lay(tmp_path / "3", mount, groups, files), NOTHING) == 64 * GIB


@pytest.mark.parametrize(
    ("top", "path", "memory"),
    [
        ("/", "/", 4096),  # the root of the namespace
        ("/", "/s", 2048),
        ("/../..", "/", 4096),  # mounted outside: no path leads here
        ("/../..", "/../../s", 2048),
        ("/", "/../s", 64 * GIB),  # this process is outside, so it is not visible
        ("/../other", "/", 64 * GIB),
    ],
)
def test_cgroup_namespaces(tmp_path: Path, top: str, path: str, memory: int) -> None:
    files = {"memory.max": "4096\n", "s/memory.max": "2048\n", "../s/memory.max": "1024\n"}
    mount = V2.replace(" / /sys", f" {top} /sys")
    assert resources.memory(lay(tmp_path, mount, f"0::{path}\n", files), NOTHING) == memory


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    mount = V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/with\040space")
    root = lay(tmp_path, mount, "0::/a b\n", {"with space/a b/memory.max": "4096\n"})
    assert resources.memory(root, NOTHING) == 4096


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "6"}, (3, 64 * GIB)),
        ({"SLURM_CPUS_ON_NODE": "6"}, (6, 64 * GIB)),
        ({"SLURM_CPUS_ON_NODE": "96"}, (16, 64 * GIB)),
        ({"SLURM_CPUS_PER_TASK": "0", "SLURM_CPUS_ON_NODE": "-1"}, (16, 64 * GIB)),
        ({"SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "4(x2)"}, (16, 64 * GIB)),
        ({"SLURM_MEM_PER_NODE": "2048"}, (16, 2 * GIB)),
        ({"SLURM_MEM_PER_NODE": "0"}, (16, 64 * GIB)),
        ({"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "6"}, (6, 6 * GIB)),
        ({"SLURM_MEM_PER_CPU": "1024"}, (16, 16 * GIB)),
    ],
)
def test_a_job_is_respected_where_nothing_confines_it(
    tmp_path: Path, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    assert found(lay(tmp_path, [], "", {}), environment) == expected


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (None, f"{resources.MOST}M"),
        (64 * GIB, f"{resources.MOST}M"),
        (4 * resources.MOST * resources.MIB, f"{resources.MOST}M"),
        (4 * resources.MOST * resources.MIB - 1, f"{resources.MOST - 1}M"),
        (4 * resources.LEAST * resources.MIB - 1, f"{resources.LEAST}M"),
        (1, f"{resources.LEAST}M"),
    ],
)
def test_mksquashfs_gets_a_quarter_within_bounds(limit: int | None, words: str) -> None:
    assert resources.mksquashfs_memory(limit) == words


@pytest.mark.processes
def test_mksquashfs_takes_it_and_the_bytes_stay_the_same(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(40):
        (tree / str(number)).write_bytes(bytes(range(256)) * (number * 500))
    outputs = set()
    for words in (resources.mksquashfs_memory(limit) for limit in (None, 1)):
        file = tmp_path / words
        argv: list[str | Path] = [
            "mksquashfs",
            tree,
            file,
            "-comp",
            "zstd",
            "-b",
            "1M",
            "-mem",
            words,
        ]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1"}
        subprocess.run(argv, check=True, capture_output=True, env=environment)
        outputs.add(file.read_bytes())
    assert len(outputs) == 1


def ask(group: Cgroup, what: str) -> str:
    """Return what a process in that cgroup answers."""
    code = f"from sqshforge.host import resources; print(resources.{what}())"
    environment = {k: v for k, v in os.environ.items() if not re.match("SLURM_", k)}
    argv = [*group.starting(), sys.executable, "-c", code]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, env=environment)
    return done.stdout.decode().strip()


@pytest.mark.processes
@pytest.mark.root
@pytest.mark.hardware("cgroups that this user may make")
def test_a_process_in_a_real_cgroup_knows_its_quota() -> None:
    with cgroup("cpu", {"cpu.max": "150000 100000"}) as group:
        assert ask(group, "processors") == "1"


@pytest.mark.processes
@pytest.mark.root
@pytest.mark.hardware("cgroups that this user may make")
def test_a_process_in_a_real_cgroup_knows_its_memory() -> None:
    with cgroup("memory", {"memory.max": str(GIB // 2)}) as group:
        assert ask(group, "memory") == str(GIB // 2)
