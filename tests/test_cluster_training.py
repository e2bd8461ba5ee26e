"""The whole way: a packed image trains on a real Slurm of two nodes, and survives.

Every disturbed run must write the losses of the undisturbed one, to the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster, cluster

STEPS = 24
FLAGS = (
    "--model_name=mamba-tiny",
    "--dataset_path=text:/usr/lib/python3.*/**/*.py",
    "--seq_length=128",
    "--batch_size=4",
    f"--num_steps={STEPS}",
    "--learning_rate=3e-3",
    "--report_interval=4",
    "--checkpoint_interval=4",
)
PATIENCE = 120  # seconds for a run, on two slow cores


@dataclass(frozen=True)
class Site:
    """A cluster, an image, and a shared folder to submit from; no other sqshforge is found."""

    slurm: Cluster
    image: Path
    folder: Path
    launcher: Path

    def submit(self, run: str, *words: str | Path, script: str = "", **env: str) -> int:
        return self.slurm.submit(
            "--nodes=2",
            *(words or (self.launcher, *FLAGS)),
            script=script,
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "IMAGE": str(self.image),
                "CHECKPOINTS": str(self.folder / run),
                "OMP_NUM_THREADS": "1",
                **env,
            },
            folder=self.folder,
        )

    def complete(self, job: int) -> str:
        """Wait for the job's success; its output."""
        state = self.slurm.wait(job, PATIENCE)
        said = self.slurm.output(job)
        assert state == "COMPLETED", said
        return said

    def reach(self, run: str, step: int) -> None:
        """Wait until a run has a complete checkpoint of a step."""
        place = self.folder / run / "checkpoints" / f"step_{step}_ckp"
        self.slurm.until(place.exists, PATIENCE, f"{place} does not come")

    def losses(self, run: str) -> list[tuple[int, float]]:
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
        return [(line["step"], line["loss"]) for line in steps]


@pytest.fixture(scope="module")
def site(
    packed_image: Path, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with cluster(kill_wait=20) as slurm:
        yield Site(slurm, packed_image, folder, root / "launch" / "mamba_fsdp.sbatch")


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> list[tuple[int, float]]:
    """The losses of a run that nothing happened to."""
    said = site.complete(site.submit("undisturbed"))
    assert "0: training.launch: node 0 of 2: 1 process" in said
    assert "1: training.launch: node 1 of 2: 1 process" in said
    losses = site.losses("undisturbed")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert losses[-1][1] < losses[0][1]
    return losses


def test_piped_out_of_the_image(site: Site, undisturbed: list[tuple[int, float]]) -> None:
    """Two nodes train what one run of the same flags trains, from the image alone."""
    script = subprocess.run(
        ["unsquashfs", "-cat", site.image, "sqshforge/launch/mamba_fsdp.sbatch"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    said = site.complete(site.submit("piped", "/dev/stdin", *FLAGS, script=script))
    assert f"{site.image} by sqshforge on n[1-2]" in said
    assert site.losses("piped") == undisturbed


def test_scancelled_and_submitted_again(site: Site, undisturbed: list[tuple[int, float]]) -> None:
    first = site.submit("cancelled")
    site.reach("cancelled", 8)
    site.slurm.cancel(first)
    assert site.slurm.wait(first, PATIENCE) == "CANCELLED"
    assert len(site.losses("cancelled")) < STEPS
    said = site.complete(site.submit("cancelled"))
    assert "resumed from" in said
    assert site.losses("cancelled") == undisturbed


def test_all_processes_of_a_node_are_killed(
    site: Site, undisturbed: list[tuple[int, float]]
) -> None:
    job = site.submit("killed")
    site.reach("killed", 8)
    running = [processes.command(pid) for pid in site.slurm.processes("n2", job)]
    assert any("training.launch" in one for one in running)
    assert any("-m training.mamba_fsdp" in one for one in running)
    assert site.slurm.kill_processes("n2", job)
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1
    assert "exit code 137: requeued" in said and "resumed from" in said
    assert site.losses("killed") == undisturbed


def test_stopped_by_sigterm(site: Site, undisturbed: list[tuple[int, float]]) -> None:
    """The signal before the time limit: saved between two checkpoints, requeued, resumed."""
    job = site.submit("stopped", REQUEUES="0")
    site.reach("stopped", 8)
    site.slurm.cancel(job, "--signal=TERM")
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1
    assert "asked to stop after step" in said and "exit code 85: requeued" in said
    assert site.losses("stopped") == undisturbed


def test_a_wrong_flag_is_told_once_and_is_final(site: Site) -> None:
    job = site.submit("wrong", site.launcher, "--num_step=5")
    assert site.slurm.wait(job, PATIENCE) == "FAILED"
    assert (site.slurm.exit_code(job), site.slurm.restarts(job)) == (2, 0)
    assert site.slurm.output(job).count("did you mean --num_steps") == 1
