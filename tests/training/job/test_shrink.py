"""A job that loses a node, has no spare and may shrink: the others continue with the same steps.

Three agents on this machine are the nodes, as in test_spares.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import facts
from tests.training.job.test_spares import STEPS, Nodes, job, short_of_memory
from tests.training.support.jobs import records
from tests.training.support.runs import losses, train, wait_for, write_text

pytestmark = pytest.mark.processes

SHRINK = {"SPARES": "0", "SHRINK": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The losses of three ranks, up to the order of sums."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return pytest.approx(train(folder / "save", data, 3, 2, STEPS), abs=1e-5)


def back(nodes: Nodes, times: int) -> None:
    """Wait until the job trains for the `times`-th time."""
    trains = wait_for(lambda: len(records(nodes.save, "training")) >= times, nodes.agents[0], 300)
    assert trains, nodes.said()


def test_nodes_are_lost_one_after_the_other(data: str, tmp_path: Path, undisturbed: Any) -> None:
    save = tmp_path / "save"
    with job(save, data, **SHRINK) as nodes:
        nodes.reach(6)
        assert [len(nodes.ranks(node)) for node in range(3)] == [1, 1, 1]
        for times, node in enumerate((1, 2)):
            lost = time.time()
            nodes.kill(node)
            back(nodes, times + 2)
            took = records(save, "training")[-1]["time"] - lost
            print(f"{node}: the next step was over after {took:.1f} s")
            nodes.reach(20 * (times + 1))
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed
    found = [(one["host"], one["then"], one["because"]) for one in records(save, "failure")]
    why = "a node is lost, no spare is left, and"
    assert found == [
        ("n2", "fewer nodes", f"{why} 2 of 3 nodes go on"),
        ("n3", "fewer nodes", f"{why} 1 of 2 nodes go on"),
    ]
    said = nodes.said()
    kept = "a step has 6 sequences, as at the start of the job:"
    assert f"{kept} 3 batches of 1 on each of 2 data-parallel ranks" in said
    assert f"{kept} 3 batches of 2 on each of 1 data-parallel ranks" in said
    assert "global_batch: the checkpoint was made" not in said
    assert (save / ".job-4242.0" / "lost.n2").exists()
    assert (save / ".job-4242.0" / "lost.n3").exists()
    assert facts(save)["state"] == "done"


def test_nodes_are_lost_at_once(data: str, tmp_path: Path, undisturbed: Any) -> None:
    """One with its processes, and one that just stops responding."""
    save = tmp_path / "save"
    with job(save, data, **SHRINK) as nodes:
        nodes.reach(6)
        nodes.stop(2)
        nodes.kill(1)
        back(nodes, 2)
        nodes.wake(2)
        assert nodes.agents[2].wait(300) == 1
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed
    assert {one["then"] for one in records(save, "failure")} == {"fewer nodes"}
    assert {one["host"] for one in records(save, "failure")} == {"n2", "n3"}


def test_a_node_that_fails_twice_is_left_out(data: str, tmp_path: Path, undisturbed: Any) -> None:
    save = tmp_path / "save"
    with job(save, data, RESTARTS="3", **SHRINK) as nodes:
        for times, step in enumerate((6, 20)):
            nodes.reach(step)
            os.kill(nodes.ranks(1)[0], signal.SIGKILL)
            back(nodes, times + 2)
        assert nodes.agents[1].wait(300) == 137
        assert nodes.end() == 0, nodes.said()
        assert nodes.agents[2].wait(300) == 0
    assert losses(save) == undisturbed
    assert [one["then"] for one in records(save, "failure")] == ["restart in place", "fewer nodes"]
    assert (save / "bad-nodes.4242.0").read_text() == "n2\n"


def test_fewer_nodes_without_room_for_copies_go_on_without_them(
    data: str, tmp_path: Path, undisturbed: Any
) -> None:
    save, path = tmp_path / "save", short_of_memory(tmp_path / "site", "WORLD_SIZE", "2")
    asked = "--checkpoint_in_memory=True"
    with job(save, data, asked, PYTHONPATH=path, RESTARTS="3", **SHRINK) as nodes:
        nodes.reach(6)
        nodes.kill(1)
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed
    assert "checkpoint_in_memory=True: on" in nodes.said(0)
    assert "checkpoint_in_memory=True: off, as two copies" in nodes.said(0)


def test_degrees_that_do_not_go_on_with_fewer_nodes(data: str, tmp_path: Path) -> None:
    """The log says so when the job begins, and gives the reason when it is requeued."""
    save = tmp_path / "save"
    with job(save, data, "--context_parallel=3", **SHRINK) as nodes:
        nodes.reach(6)
        nodes.kill(1)
        assert nodes.end() == 1
    why = "context_parallel: 2 ranks cannot be cut into groups of 3"
    [failure] = records(save, "failure")
    assert failure["then"] == "requeue" and failure["because"].endswith(
        f"no spare is left; with 2 nodes it cannot go on: {why}"
    )
    assert f"WARNING: SHRINK: with 2 nodes it cannot go on, but is requeued: {why}" in nodes.said(0)


def test_what_trains_by_other_means_is_refused(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from training import launch

    for name, value in {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NUM_NODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "SHRINK": "1",
        "PREFLIGHT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    flags = (
        "--backend=gloo",
        "--max_steps=1",
        "--seq_len=128",
        f"--checkpoint_dir={tmp_path}",
        f"--data_dir={data}",
    )
    assert launch.main(["--module", "training.mamba2_neuron", "--nproc", "1", "--", *flags]) == 2
    assert "SHRINK: training.mamba2_neuron cannot go on with fewer nodes" in capfd.readouterr().err
