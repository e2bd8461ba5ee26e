"""A failed process is restarted in its container: same job, same nodes, same losses."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.cluster.conftest import FLAGS
from tests.support import json_lines, processes
from tests.support.run_folders import facts
from tests.support.site import TIMEOUT, Losses, Site

NODES = ("n1", "n2")
WATCHED = (*FLAGS, "--hang_seconds=4", "--hang_abort_seconds=12")
MOST = 20.0
"""Seconds from kill -9 to the end of the next step, without reading the checkpoint.

Scaled up if more processes compute than there are processors, since most of it is imports.
"""


def having(site: Site, job: int, node: str, word: str) -> list[int]:
    """Return the processes of a job on a node whose command line contains a word."""
    found = site.slurm.processes(node, job)
    return [pid for pid in found if word in processes.command(pid)]


def rank(site: Site, job: int, node: str) -> int:
    [found] = having(site, job, node, "-m training.mamba_fsdp")
    return found


def agents(site: Site, job: int) -> list[list[int]]:
    """Return the programs in the containers of each node: a container lives as long as they do."""
    return [having(site, job, node, "-m training.launch") for node in NODES]


def records(site: Site, run: str, job: int, kind: str) -> list[dict[str, Any]]:
    path = site.place(run) / "jobs" / f"{job}.jsonl"
    return json_lines.read(path, kind) if path.exists() else []


def kill(site: Site, run: str, job: int, node: str) -> float:
    """Kill -9 a node's rank; returns the seconds until the next step ends, measured as for MOST."""
    before = len(records(site, run, job, "training"))
    os.kill(rank(site, job, node), signal.SIGKILL)
    killed = time.time()
    site.slurm.until(
        lambda: len(records(site, run, job, "training")) > before, TIMEOUT, "it does not go on"
    )
    took = records(site, run, job, "training")[-1]["time"] - killed
    reading = float(re.findall(r"checkpoint ([\d.]+) s", site.slurm.output(job))[-1])
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(
        f"kill -9 on {node}: {took:.1f} s to the end of the next step, {reading:.1f} s of these "
        f"reading the checkpoint, at a load of {load:.1f} a processor"
    )
    return (took - reading) / max(1.0, load)


def left_behind(job: int) -> list[Path]:
    """Return what torchrun's agents of a job have left; their folders are named after the job."""
    tops = {Path("/tmp"), Path(tempfile.gettempdir())}
    return [path for top in tops for path in top.glob(f"torchelastic_*/{job}.*")]


def test_a_rank_is_killed(site: Site, undisturbed: Losses) -> None:
    job = site.submit("restarted", *FLAGS)
    site.reach("restarted", 8)
    containers = agents(site, job)
    assert kill(site, "restarted", job, "n2") < MOST
    assert agents(site, job) == containers
    said = site.complete(job)
    assert site.slurm.restarts(job) == 0
    assert "was killed by SIGKILL" in said and "restart 1 of 3 in these containers" in said
    assert said.count("resumed from") == 1 and said.count("the container is up") == 1
    assert said.count("preflight") == said.partition("restart in place")[0].count("preflight")
    assert site.losses("restarted") == undisturbed
    shown = facts(site.place("restarted"))
    [failure] = shown["jobs"][0]["starts"][0]["failures"]
    assert failure["host"] == "n2" and failure["then"] == "restart in place"
    assert failure["cost"]["lost"] <= 4 and 0 < shown["goodput"] < 1
    assert left_behind(job) == []


def test_several_kills(site: Site, undisturbed: Losses) -> None:
    """The first rank, which has the folder's lease, is among them."""
    job = site.submit("kills", *FLAGS, RESTARTS="9", PREFLIGHT="0")
    containers = []
    for step, node in ((4, "n1"), (8, "n2"), (12, "n1"), (16, "n2")):
        site.reach("kills", step)
        containers.append(agents(site, job))
        assert kill(site, "kills", job, node) < MOST
    site.complete(job)
    assert site.slurm.restarts(job) == 0
    assert all(one == containers[0] for one in containers)
    assert site.losses("kills") == undisturbed


def test_a_rank_hangs(site: Site, undisturbed: Losses) -> None:
    """The watch of one node ends its rank; the other node's watch cannot even see a signal."""
    job = site.submit("hangs", *WATCHED, PREFLIGHT="0")
    site.reach("hangs", 8)
    os.kill(rank(site, job, "n2"), signal.SIGSTOP)
    said = site.complete(job)
    assert site.slurm.restarts(job) == 0
    assert "rank 1 hangs" in said and "restart in place: rank 0 ended with exit code 86" in said
    assert "restarts its ranks too" in said
    assert site.losses("hangs") == undisturbed


def test_the_same_failure_twice_is_requeued(site: Site) -> None:
    job = site.submit("broken", *FLAGS, "--learning_rate=1e30", REQUEUES="1", PREFLIGHT="0")
    assert site.slurm.wait(job, TIMEOUT) == "FAILED"
    assert (site.slurm.exit_code(job), site.slurm.restarts(job)) == (1, 1)
    then = [one["then"] for one in records(site, "broken", job, "failure")]
    assert then == ["restart in place", "requeue", "give up"]
    said = site.slurm.output(job)
    assert "exit code 1: requeued" in said and "given up after 1 restarts" in said


def test_asked_to_stop_while_it_restarts(site: Site, undisturbed: Losses) -> None:
    job = site.submit("interrupted", *FLAGS, REQUEUES="0", PREFLIGHT="0")
    site.reach("interrupted", 8)
    os.kill(rank(site, job, "n2"), signal.SIGKILL)
    site.slurm.until(
        lambda: records(site, "interrupted", job, "failure"), TIMEOUT, "no failure is noted"
    )
    site.slurm.cancel(job, "--batch", "--signal=TERM")
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1 and "exit code 85: requeued" in said
    assert site.losses("interrupted") == undisturbed
    assert len(records(site, "interrupted", job, "failure")) == 1
