"""Launchers under a stand-in for enroot, whose container dies with the process that serves it.

`make test-enroot` runs them under the real enroot and pyxis, if these are installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import FLAGS
from tests.support.site import TIMEOUT, Losses, Site


@pytest.fixture
def enroot(site: Site, root: Path) -> Iterator[str]:
    """The PATH of jobs, with the stand-in on it."""
    programs = site.folder / "enroot"
    programs.mkdir()
    shutil.copy(root / "tests/support/stand_in_enroot.sh", programs / "enroot")
    shutil.copy(root / "tests/support/stand_in_enroot/squashfuse", programs)
    yield f"{programs}:{site.path}"
    shutil.rmtree(programs)


@pytest.mark.parametrize("words", [("--batch", "--signal=TERM"), ("--signal=TERM",)])
def test_a_stop_saves(site: Site, undisturbed: Losses, enroot: str, words: tuple[str, ...]) -> None:
    """Applies both when only the launcher is signaled and when all processes are."""
    run = f"enroot-{len(words)}"
    job = site.submit(run, *FLAGS, PATH=enroot, REQUEUES="0")
    site.reach(run, 8)
    site.slurm.cancel(job, *words)
    said = site.complete(job)
    assert "by enroot on n[1-2]" in said
    assert "asked to stop after step" in said and "exit code 85: requeued" in said
    assert site.slurm.restarts(job) == 1
    assert site.losses(run) == undisturbed


def test_scancel_saves_what_it_can(site: Site, undisturbed: Losses, enroot: str) -> None:
    """It continues and signals all processes; the launcher does not requeue the job."""
    run = "enroot-cancelled"
    job = site.submit(run, *FLAGS, PATH=enroot, PREFLIGHT="0")
    site.reach(run, 8)
    site.slurm.cancel(job)
    assert site.slurm.wait(job, TIMEOUT) == "CANCELLED"
    said = site.slurm.output(job)
    assert "asked to stop after step" in said and "SIGBUS" not in said
    assert site.slurm.restarts(job) == 0
    again = site.submit(run, *FLAGS, PATH=enroot, PREFLIGHT="0")
    assert "resumed from" in site.complete(again)
    assert site.losses(run) == undisturbed


def test_a_root_that_is_lost_is_reported(site: Site, enroot: str) -> None:
    """The root is lost without any signal from Slurm."""
    run = "enroot-lost"
    env: Any = {"PATH": enroot, "REQUEUES": "0", "PREFLIGHT": "0"}
    job = site.submit(run, *FLAGS, "--num_steps=100000", **env)
    site.reach(run, 8)
    site.kill("squashfuse", job)
    assert site.slurm.wait(job, TIMEOUT) == "FAILED"
    assert "SIGBUS: the files of the container were lost" in site.slurm.output(job)
