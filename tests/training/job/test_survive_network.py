"""A rank whose peers are cut off or gone ends by itself, with a message and its own exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.network_namespaces import Bridge, bridged
from tests.support.processes import descendants, program
from tests.training.support.runs import ROOT, TINY, kill_tree, losses, train, wait_for, write_text
from training.errors import HUNG

pytestmark = pytest.mark.processes

ABORT = 12
"""The setting hang_abort_seconds."""
LAUNCH = """\
import sys
from training import launch
from training.job import agent
agent.UNNOTICED_SECONDS = 10.0
sys.exit(launch.main(sys.argv[1:]))
"""
"""A training.launch that waits less for what it cannot reach."""


@pytest.fixture
def nodes() -> Iterator[Bridge]:
    with bridged(["host-0", "host-1"]) as bridge:
        yield bridge


@contextmanager
def job(
    nodes: Bridge, folder: Path, *more: str, **other: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a run of one rank per node, and wait until it trains; node N's output is in said.N."""
    flags = (
        *(
            *TINY,
            f"--dataset_path={write_text(folder / 'text')}",
            f"--save_ckpt_path={folder}/save",
        ),
        *("--num_steps=1000000", "--report_interval=1", "--hang_seconds=4"),
        f"--hang_abort_seconds={ABORT}",
        *more,
    )
    python = warm.python()
    env = {name: one for name, one in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "98"}
    env |= {"SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": nodes.machines[0].address}
    env |= {"PREFLIGHT": "0"} | python | other
    (folder / "waits_less.py").write_text(LAUNCH)
    processes = []
    try:
        for rank, machine in enumerate(nodes.machines):
            words = machine.enter(
                python["PYTHON_EXEC"], str(folder / "waits_less.py"), "--", *flags
            )
            with (folder / f"said.{rank}").open("w") as said:
                process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *words],
                    env={**env, "SLURM_NODEID": str(rank)},
                    stdout=said,
                    stderr=said,
                    text=True,
                )
            processes.append(process)
        lines = folder / "save" / "metrics.jsonl"
        assert wait_for(
            lambda: lines.exists() and len(losses(folder / "save")) > 20, processes[0], seconds=120
        )
        yield processes
    finally:
        for process in processes:
            kill_tree(process)
            process.wait()


def rank_process(process: subprocess.Popen[str]) -> int:
    """Return the process of the one rank below a launcher."""
    (found,) = (
        pid
        for pid in descendants(process.pid)
        if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    )
    return program(found)


def has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_link_that_goes_down(nodes: Bridge, tmp_path: Path) -> None:
    """No connection is closed: without the watch the ranks would wait for half an hour."""
    with job(nodes, tmp_path) as processes:
        ranks = [rank_process(process) for process in processes]
        nodes.unplug(1)
        begun = time.monotonic()
        for process, pid in zip(processes, ranks, strict=True):
            assert wait_for(partial(has_ended, pid), process) or process.returncode == HUNG
        assert time.monotonic() - begun < ABORT + 25
        assert [process.wait(40) for process in processes] == [HUNG, HUNG]
    first, second = ((tmp_path / f"said.{rank}").read_text() for rank in range(2))
    assert "hang: rank 1 hangs, without an answer; no progress for" in first
    assert re.search(r"rank 1: its process \d+ on host-1 does not answer", first)
    assert "error: rank 1 hangs, without an answer" in first
    assert "ended with exit code 86: no progress, ended by the watch" in first
    assert re.search(r"error: rank 1 waits in step \d+, .*\(hang_abort_seconds\)", second)
    assert not (tmp_path / "save" / ".running").exists()


def test_the_first_rank_is_killed(nodes: Bridge, tmp_path: Path) -> None:
    """Its launcher goes with it, and the ranks' store: connections are closed."""
    with job(nodes, tmp_path) as processes:
        for pid in (processes[0].pid, *descendants(processes[0].pid)):
            os.kill(pid, signal.SIGKILL)
        assert processes[1].wait(ABORT + 25) == 1
    said = (tmp_path / "said.1").read_text()
    address = nodes.machines[0].address
    assert f"[{address}]" in said, "the peer that is gone"
    assert f"node 0 has ended, its rendezvous is gone at {address}:" in said


RESTARTED = ("--num_steps=80", "--batch_size=2", "--checkpoint_interval=10")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_restarted_in_place(nodes: Bridge, tmp_path: Path, victim: int) -> None:
    """The other node's rank, whether sound or taken along, restarts too; the agents stay."""
    undisturbed = train(tmp_path / "undisturbed", write_text(tmp_path / "text"), 2, 2, 80)
    with job(nodes, tmp_path, *RESTARTED, RESTARTS="1", REQUEUES="0") as processes:
        first = [rank_process(process) for process in processes]
        os.kill(first[victim], signal.SIGKILL)
        assert [process.wait(120) for process in processes] == [0, 0]
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert f"restart in place: rank {victim} was killed by SIGKILL after step" in said[victim]
    assert "restart in place" not in said[1 - victim]
    assert said[0].count("resumed from") == 1 and "goes on after step" in said[0]
    assert losses(tmp_path / "save") == undisturbed


def test_a_stopped_rank_of_another_node_is_restarted(nodes: Bridge, tmp_path: Path) -> None:
    """One node's watch ends its rank; the other node sees its own rank waiting, and follows."""
    undisturbed = train(tmp_path / "undisturbed", write_text(tmp_path / "text"), 2, 2, 80)
    with job(nodes, tmp_path, *RESTARTED, RESTARTS="1") as processes:
        os.kill(rank_process(processes[1]), signal.SIGSTOP)
        assert [process.wait(120) for process in processes] == [0, 0]
    assert "restarts its ranks too: rank 0 ended with exit code 86" in (
        (tmp_path / "said.1").read_text()
    )
    assert losses(tmp_path / "save") == undisturbed


def test_a_node_that_is_lost_is_not_waited_for(nodes: Bridge, tmp_path: Path) -> None:
    """Its agent cannot come back: the job ends, and its launcher requeues it."""
    with job(nodes, tmp_path, RESTARTS="3", REQUEUES="3") as processes:
        for pid in (processes[1].pid, *descendants(processes[1].pid)):
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        assert processes[0].wait(120) == 1
        assert time.monotonic() - begun < 50
    said = (tmp_path / "said.0").read_text()
    assert "requeue: rank 0 ended with exit code 1 after step" in said
    assert "no node has said what took its ranks along: one may be lost" in said
