"""What the agents of a job's nodes record of a failure; ranks' notes are real, their ends not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.training.support.jobs import records
from training.job.agent import _examine
from training.job.node import Job
from training.job.replay.node import is_due
from training.job.restart.control import RestartControl
from training.job.restart.elastic import InPlaceAgent, Ranks
from training.job.restart.escalation import Budget
from training.job.restart.ledger import Ledger
from training.job.restart.steps import StepNotes

JOB = Job(id="4242", nodes=2)
SPARED = Job(id="4242", nodes=3, spares=1)
RAISES = """\
import sys
from training import entrypoint, errors

def work():
    raise {error}

sys.exit(entrypoint.exit_code(work))
"""
NOT_FINITE = "errors.TrainingError('step 10: loss is nan')"  # every rank raises it
OUT_OF_MEMORY = "MemoryError('rank 2')"


class Node:
    """The agent of one node of a job, with its only rank."""

    def __init__(self, job: Job, folder: Path, rank: int, budget: Budget) -> None:
        self.rank, self._budget, self._asked = rank, budget, False
        names = " ".join(f"n{node}" for node in range(job.nodes))
        self.environment = {"CHECKPOINTS": str(folder), "NODES": names}
        own = replace(job, node_rank=rank)
        self._control = RestartControl(own, Ledger(own, [folder]), budget, self.environment)
        self._notes = folder

    def fails(
        self, store: Any, code: int, error: str = "", *, asked: bool = False, restarted: int
    ) -> bool:
        """Let the rank fail; returns whether it is restarted in place."""
        note = self._notes / f"error.{self.rank}"
        note.unlink(missing_ok=True)
        if error:
            env = {**os.environ, "RANK": str(self.rank), "TORCHELASTIC_ERROR_FILE": str(note)}
            words = [sys.executable, "-c", RAISES.format(error=error)]
            assert subprocess.run(words, env=env, stderr=subprocess.DEVNULL).returncode == code
        agent: Any = object.__new__(InPlaceAgent)
        agent._worker_group = SimpleNamespace(
            group_world_size=2, spec=SimpleNamespace(max_restarts=self._budget.restarts)
        )
        agent._remaining_restarts = self._budget.restarts - restarted
        agent._store, agent._is_stuck, agent._control = store, False, self._control
        agent._ranks = Ranks(
            asked=lambda: asked,
            hand_on=lambda: None,
            examine=_examine,
            leave=lambda codes: pytest.fail("the store has not answered"),
            control=self._control,
        )
        failed = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(note))
        return bool(agent._restarts(SimpleNamespace(failures={self.rank: failed})))

    def takes(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        """Let the rank take steps, including the first of this start."""
        monkeypatch.setenv("STEP_NOTES", self.environment["STEP_NOTES"])
        monkeypatch.setenv("LOCAL_RANK", "0")
        notes = StepNotes(steps[0] - 1)
        for step in steps:
            notes.taken(step)


def named_bad(folder: Path) -> list[str]:
    """Return the nodes that the next start leaves out with EXCLUDE=1."""
    return [line for one in folder.glob("bad-nodes*") for line in one.read_text().split()]


@pytest.mark.processes
@pytest.mark.parametrize("second", [9, 17])
def test_an_error_of_all_ranks_is_blamed_on_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: int
) -> None:
    """The loss is NaN: only rank 0 reports it, though its node has done nothing wrong."""
    node = Node(SPARED, tmp_path, 0, Budget(restarts=3, requeues=3))
    for restarted, step in enumerate((9, second)):
        node.takes(monkeypatch, step)
        node.fails(HashStore(), 1, NOT_FINITE, restarted=restarted)
    assert [one["step"] for one in records(tmp_path, "failure")] == [9, second]
    assert named_bad(tmp_path) == []


@pytest.mark.processes
def test_a_failure_that_comes_again_at_its_step_is_blamed_on_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever node was first to publish it; it would fail on another one, too."""
    node = Node(SPARED, tmp_path, 0, Budget(restarts=3, requeues=3))
    for restarted in range(2):
        node.takes(monkeypatch, 9)
        again = node.fails(HashStore(), 1, OUT_OF_MEMORY, restarted=restarted)
        assert again == (restarted == 0)
    assert named_bad(tmp_path) == []


@pytest.mark.processes
def test_a_node_whose_own_ranks_fail_twice_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(SPARED, tmp_path, 0, Budget(restarts=3, requeues=3))
    for restarted, step in enumerate((9, 17)):
        node.takes(monkeypatch, step)
        node.fails(HashStore(), 1, OUT_OF_MEMORY, restarted=restarted)
    assert named_bad(tmp_path) == ["n0"]


def test_a_request_to_stop_is_no_failure_of_the_node_that_is_first_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks had failed once before."""
    node = Node(SPARED, tmp_path, 0, Budget(restarts=3, requeues=3))
    node.takes(monkeypatch, 9)
    assert node.fails(HashStore(), -9, restarted=0)
    node.takes(monkeypatch, 17)
    assert not node.fails(HashStore(), 85, asked=True, restarted=1)
    assert named_bad(tmp_path) == []


class Gone:
    """The store of a node 0 that has ended."""

    def compare_set(self, *words: str) -> bytes:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(("store", "noted"), [(HashStore, 1), (Gone, 2)])
def test_a_hang_that_ends_all_nodes_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, noted: int
) -> None:
    """Even if nothing is restarted in place, as with RESTARTS=0 or on more than 256 nodes."""
    budget, known = Budget(restarts=0, requeues=3), store()
    for node in (Node(JOB, tmp_path, rank, budget) for rank in range(2)):
        node.takes(monkeypatch, 3)
        assert not node.fails(known, 86, restarted=0)
    assert len(records(tmp_path, "failure")) == noted
    again = replace(JOB, restarts=1)
    [failure] = Ledger(again, [tmp_path]).failures()
    assert not is_due([failure], 2, {})
    node = Node(again, tmp_path, 0, replace(budget, requeued=1))
    node.takes(monkeypatch, 3)
    node.fails(store(), 86, restarted=0)
    assert is_due(Ledger(again, [tmp_path]).failures(), 2, {})  # it has hung there twice


def test_nodes_that_have_saved_leave_the_failure_to_the_one_that_has_failed(
    tmp_path: Path,
) -> None:
    budget, store = Budget(restarts=0, requeues=3), HashStore()
    for rank, code in enumerate((85, -9)):
        Node(JOB, tmp_path, rank, budget).fails(store, code, restarted=0)
    [failure] = records(tmp_path, "failure")
    assert (failure["rank"], failure["code"]) == (1, 137)
