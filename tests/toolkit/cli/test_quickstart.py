"""`make quickstart` in a fresh clone, with docker, on a machine of 4 GiB."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkouts, engines
from tests.support.cgroups import Cgroup, cgroup

pytestmark = pytest.mark.processes

MEMORY = 4 << 30
# Variables of a make that runs these tests, or of a user who has chosen the engine.
FOREIGN = ("ENGINE", "OFFLINE", "TARGET", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")


@pytest.fixture
def machine() -> Iterator[Cgroup]:
    """Limits the memory of everything started in it and of all containers together."""
    with cgroup("memory", {"memory.max": str(MEMORY)}, top=True) as whole:
        yield whole


@pytest.fixture
def disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files on the checkout's disk: files in memory would count as such."""
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "build") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def quickstart(
    checkout: Path, tools: Path, group: Cgroup, host: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    path = f"{tools}:{environment['PATH']}"
    return subprocess.run(
        [*group.starting(), "make", "quickstart"],
        cwd=checkout,
        env={**environment, "DOCKER_HOST": host, "PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.root
@pytest.mark.hardware("a cgroup of memory")
def test_from_a_clone_to_a_proven_sqsh(machine: Cgroup, disk: Path) -> None:
    """It uses the client of the daemon's own version, whatever else is on the PATH."""
    checkout, tools = checkouts.clone(disk / "clone"), disk / "tools"
    tools.mkdir()
    (tools / "docker").symlink_to(engines.CLIENT)
    group = machine.below("processes")
    options = ["--exec-opt=native.cgroupdriver=cgroupfs"]
    options += [f"--cgroup-parent=/{machine.folder.name}/containers"]
    with engines.daemon(group.starting(), options) as host:
        first = quickstart(checkout, tools, group, host)
        began = time.monotonic()
        second = quickstart(checkout, tools, group, host)
        took = time.monotonic() - began
        assert machine.out_of_memory() == 0
    for done in (first, second):
        assert done.returncode == 0, done.stdout + done.stderr
        rows = dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", done.stdout, re.MULTILINE))
        assert rows["image"].startswith("dockerd://localhost/sqshforge-cpu-mamba")
        assert rows["sqsh"].startswith(str(checkout / "build/cpu-mamba.sqsh"))
        assert rows["smoke test"].startswith("passed: 22 of 22 checks")
        assert done.stdout.splitlines()[-1].startswith("next: ")
    assert "making .venv" in first.stdout and "already done" not in first.stdout
    assert "making .venv" not in second.stdout and second.stdout.count("already done") == 3
    assert took < 30
    assert (checkout / "build/cpu-mamba.sqsh").stat().st_size > 100 << 20
