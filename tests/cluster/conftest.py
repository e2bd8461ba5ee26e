"""A real Slurm of two separate nodes, an image, and a shared folder to submit from.

Jobs of tests that are not about the start have PREFLIGHT=0, as preflight's processes load torch,
which the ranks then do again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.site import Losses, Site
from tests.support.slurm import cluster

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


@pytest.fixture(scope="session")
def site(
    packed_image: Path, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    small = folder / "small"
    small.mkdir()
    # Mount it before the nodes get mounts of their own, so that they have it too.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", small], check=True)
    try:
        with cluster(kill_wait=20, apart=True) as slurm:
            yield Site(slurm, packed_image, folder, root)
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Losses:
    """The losses of a run that nothing disturbed."""
    said = site.complete(site.submit("undisturbed", *FLAGS))
    assert "0: training.launch: node 0 of 2: 1 process" in said
    assert "1: training.launch: node 1 of 2: 1 process" in said
    losses = site.losses("undisturbed")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert losses[-1][1] < losses[0][1]
    return losses
