"""A node is lost for good, and a spare takes its place: same job, same start, same losses.

On a Slurm of three nodes, two of which train.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.conftest import FLAGS
from tests.cluster.test_restart import having, records
from tests.support.run_folders import facts
from tests.support.site import TIMEOUT, Losses, Site
from tests.support.slurm import ClusterError, cluster

NODES = ("n1", "n2", "n3")
SPARE = {"SPARES": "1"}
THREE = ("--nodes=3",)
MOST = 60.0
"""Seconds from the loss of a node to the end of the next step.

Measured without reading the checkpoint, and scaled by the load, like MOST of test_restart.
"""


@pytest.fixture(scope="module")
def site(
    packed_image: Path, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    # Time for a busy machine to notice the loss; Slurm's own default is five minutes.
    settings = ("SlurmdTimeout=60",)
    with cluster(kill_wait=20, apart=True, settings=settings, nodes=NODES) as slurm:
        yield Site(slurm, packed_image, folder, root)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Losses:
    site.complete(site.submit("undisturbed", *FLAGS, PREFLIGHT="0"))
    return site.losses("undisturbed")


def agent(site: Site, job: int, node: str) -> list[int]:
    return having(site, job, node, "-m training.launch")


def back(site: Site, run: str, job: int, lost: float) -> float:
    """Wait until it trains again; returns the seconds since the loss, measured as for MOST."""
    site.slurm.until(
        lambda: len(records(site, run, job, "training")) > 1, TIMEOUT, "it does not go on"
    )
    took = records(site, run, job, "training")[-1]["time"] - lost
    known = records(site, run, job, "failure")[-1]["time"] - lost
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(
        f"known after {known:.1f} s, the next step over after {took:.1f} s, at a load of "
        f"{load:.1f} a processor"
    )
    return took / max(1.0, load)


def is_back(site: Site, node: str) -> bool:
    """Bring a node back as an administrator does, because Slurm rarely checks one that is down."""
    with suppress(ClusterError):  # it is not down
        site.slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    return site.slurm.is_idle(node)


def test_a_node_is_lost(site: Site, undisturbed: Losses) -> None:
    """Kill Slurm's daemon and all its processes; the node does not come back."""
    job = site.submit("lost", *FLAGS, asked=THREE, **SPARE)
    site.reach("lost", 8)
    first, third = agent(site, job, "n1"), agent(site, job, "n3")
    lost = time.time()
    site.slurm.lose("n2")
    try:
        assert back(site, "lost", job, lost) < MOST
        assert (agent(site, job, "n1"), agent(site, job, "n3")) == (first, third)
        said = site.complete(job)
    finally:
        site.slurm.bring("n2")
    assert site.slurm.restarts(job) == 0
    assert site.losses("lost") == undisturbed
    assert "spare node: n2 is lost" in said and "mamba_fsdp: n2 is lost" in said
    assert "2: training.launch: node 2, a spare, takes the place of another" in said
    assert said.count("the container is up") == 1 and said.splitlines()[-1] == "mamba_fsdp: done"
    [failure] = facts(site.place("lost"))["jobs"][0]["starts"][0]["failures"]
    assert (failure["host"], failure["then"]) == ("n2", "spare node")
    assert failure["cost"]["lost"] <= 4 and failure["cost"]["seconds"] > 0


def test_its_network_is_gone(site: Site, undisturbed: Losses) -> None:
    """No connection is closed, so its ranks, and those waiting for them, are not notified."""
    assert site.slurm.bridge
    job = site.submit("unplugged", *FLAGS, asked=THREE, **SPARE, PREFLIGHT="0")
    site.reach("unplugged", 8)
    lost = time.time()
    site.slurm.bridge.unplug(1)
    try:
        assert back(site, "unplugged", job, lost) < MOST
        # The node finds out by itself that another one has taken its place.
        site.slurm.until(lambda: not site.slurm.processes("n2", job), TIMEOUT, "n2 trains on")
        said = site.complete(job)
    finally:
        site.slurm.bridge.plug(1)
    assert site.slurm.restarts(job) == 0 and "spare node: n2 is lost" in said
    assert site.losses("unplugged") == undisturbed
    site.slurm.until(lambda: is_back(site, "n2"), TIMEOUT, "n2 does not come back")


def test_the_first_node_is_lost(site: Site, undisturbed: Losses) -> None:
    """It has the launcher and the store: Slurm requeues the job, as without spares."""
    job = site.submit("first", *FLAGS, asked=THREE, **SPARE)
    site.reach("first", 8)
    site.slurm.lose("n1")
    site.slurm.until(lambda: site.slurm.restarts(job) == 1, TIMEOUT, "the job is not requeued")
    site.slurm.bring("n1")
    said = site.complete(job)
    assert "resumed from" in said and site.losses("first") == undisturbed


def test_both_nodes_are_lost(site: Site, undisturbed: Losses) -> None:
    """The second loss finds no spare: the job is requeued, again with all three nodes."""
    job = site.submit(
        "both", *FLAGS, "--checkpoint_interval=2", asked=THREE, **SPARE, PREFLIGHT="0"
    )
    site.reach("both", 4)
    site.slurm.kill_processes("n2", job)
    back(site, "both", job, time.time())
    site.slurm.kill_processes("n3", job)
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1 and site.losses("both") == undisturbed
    then = [one["then"] for one in records(site, "both", job, "failure")]
    assert then == ["spare node", "requeue"]
    assert re.search("requeue: n3 is lost: .*: a node is lost, and no spare is left", said)
    assert [one["spares"] for one in records(site, "both", job, "start")] == [1, 1]
