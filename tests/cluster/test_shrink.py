"""A node is lost for good, and the others continue without it: same job, same start, same losses.

On a Slurm of three nodes, all of which train.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import FLAGS
from tests.cluster.test_spares import MOST, NODES, THREE, agent, back
from tests.support.run_folders import facts
from tests.support.site import Losses, Site
from tests.support.slurm import cluster

SHRINK = {"SHRINK": "1"}


@pytest.fixture(scope="module")
def site(
    packed_image: Path, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    settings = ("SlurmdTimeout=60",)  # as in test_spares
    with cluster(kill_wait=20, apart=True, settings=settings, nodes=NODES) as slurm:
        yield Site(slurm, packed_image, folder, root)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Losses:
    site.complete(site.submit("undisturbed", *FLAGS, asked=THREE, PREFLIGHT="0"))
    return site.losses("undisturbed")


def test_a_node_is_lost(site: Site, undisturbed: Losses) -> None:
    """Kill Slurm's daemon and all its processes; twelve sequences become six per rank."""
    job = site.submit("lost", *FLAGS, asked=THREE, **SHRINK)
    site.reach("lost", 8)
    first, third = agent(site, job, "n1"), agent(site, job, "n3")
    lost = time.time()
    site.slurm.lose("n2")
    try:
        assert back(site, "lost", job, lost) < MOST
        assert (agent(site, job, "n1"), agent(site, job, "n3")) == (first, third)
        said = site.complete(job)
        assert not site.slurm.processes("n1", job) and not site.slurm.processes("n3", job)
    finally:
        site.slurm.bring("n2")
    assert site.slurm.restarts(job) == 0
    found, wanted = (dict(losses) for losses in (site.losses("lost"), undisturbed))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert "fewer nodes: n2 is lost" in said and "mamba_fsdp: n2 is lost" in said
    assert "2 batches of 3 on each of 2 data-parallel ranks" in said
    assert said.count("the container is up") == 1 and said.splitlines()[-1] == "mamba_fsdp: done"
    [failure] = facts(site.place("lost"))["jobs"][0]["starts"][0]["failures"]
    assert (failure["host"], failure["then"]) == ("n2", "fewer nodes")
    assert failure["cost"]["lost"] <= 4 and failure["cost"]["seconds"] > 0
