"""What follows a failure, according to the table of docs/training/failures.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from training.job import job_log
from training.job.restart.control import Decision
from training.job.restart.elastic import InPlaceAgent
from training.job.restart.escalation import (
    NO_CAUSE,
    STUCK,
    Budget,
    Failure,
    Step,
    Verdict,
    decide,
    worn,
)

KILLED = Failure(rank=1, code=137, step=8, why="rank 1 was killed by SIGKILL", host="n2")
BUDGET = Budget(restarts=3, requeues=3)


@pytest.mark.parametrize("code", [1, 86, 134, 137, 139])
def test_processes_that_fail_are_restarted_in_place(code: int) -> None:
    verdict = decide(replace(KILLED, code=code), [], BUDGET)
    assert verdict == Verdict(step=Step.RESTART, why="restart 1 of 3 in these containers")


@pytest.mark.parametrize("code", [2, 3])
def test_what_a_person_has_to_fix_is_not_tried_again(code: int) -> None:
    assert decide(replace(KILLED, code=code), [], BUDGET).step is Step.FIX


def test_a_run_that_was_asked_to_stop_has_not_failed() -> None:
    assert decide(replace(KILLED, code=85), [], BUDGET).step is Step.STOP


@pytest.mark.parametrize(
    ("code", "obstacle", "why"),
    [
        (87, "", "a node is bad"),
        (135, "", "the files of a container are gone"),
        (137, STUCK, "a process of the node does not die by kill -9"),
        (1, NO_CAUSE, "no node has said what took its ranks along: one may be lost"),
    ],
)
def test_the_same_containers_are_of_no_use(code: int, obstacle: str, why: str) -> None:
    verdict = decide(replace(KILLED, code=code), [], BUDGET, obstacle)
    assert verdict == Verdict(step=Step.REQUEUE, why=why)


def test_the_same_failure_twice_is_not_restarted() -> None:
    """The same step and exit code, on whichever rank; also before the first step."""
    again = replace(KILLED, rank=0, host="n1")
    verdict = decide(again, [KILLED], BUDGET)
    assert verdict.step is Step.REQUEUE
    assert verdict.why == "it failed after step 8 in the same way before"
    assert decide(replace(again, step=9), [KILLED], BUDGET).step is Step.RESTART
    assert decide(replace(again, code=1), [KILLED], BUDGET).step is Step.RESTART
    early = replace(KILLED, step=None)
    assert decide(early, [early], BUDGET).why == (
        "it failed before its first step in the same way before"
    )


def test_each_step_has_its_count() -> None:
    spent = replace(BUDGET, restarted=3)
    assert decide(KILLED, [], replace(BUDGET, restarted=2)).step is Step.RESTART
    assert decide(KILLED, [], spent) == Verdict(step=Step.REQUEUE, why="of RESTARTS=3 none is left")
    assert decide(KILLED, [], replace(spent, requeued=2)).step is Step.REQUEUE
    end = decide(KILLED, [], replace(spent, requeued=3))
    # The number is not named: the launcher's may exceed the user's after time limits.
    assert end.step is Step.GIVE_UP and end.why.endswith("; of REQUEUES none is left")
    alone = decide(KILLED, [], replace(spent, requeues=None))
    assert alone.step is Step.GIVE_UP and "outside of Slurm" in alone.why


LOST = Failure(rank=None, code=87, step=8, why="n2 is lost", host="n2", node=1)


def test_a_lost_node_is_replaced_as_long_as_there_are_spares() -> None:
    """Whatever is left of RESTARTS, and even if another was lost after the same step."""
    spent = replace(BUDGET, restarted=3, spares=1)
    for before in ([], [replace(LOST, host="n3", node=2)]):
        assert decide(LOST, before, spent) == Verdict(
            step=Step.REPLACE, why="a node is lost, and a spare takes its place"
        )
    none = decide(LOST, [], BUDGET)
    assert none == Verdict(step=Step.REQUEUE, why="a node is lost, and no spare is left")
    assert decide(LOST, [], replace(BUDGET, requeued=3)).step is Step.GIVE_UP


def test_fewer_nodes_go_on_where_that_was_asked_for_and_can_be() -> None:
    """Only after the spares, if a node is lost or has failed twice; never without the first."""
    may = replace(BUDGET, nodes=3, no_fewer="")
    assert decide(LOST, [], replace(may, spares=1)).step is Step.REPLACE
    assert decide(LOST, [], may) == Verdict(
        step=Step.SHRINK, why="a node is lost, no spare is left, and 2 of 3 nodes go on"
    )
    second = replace(KILLED, node=1, step=20)
    assert decide(second, [], may).step is Step.RESTART
    assert decide(second, [KILLED], may).step is Step.SHRINK
    assert decide(replace(second, node=0), [KILLED], may).step is Step.RESTART
    assert decide(replace(second, step=8), [KILLED], may).step is Step.REQUEUE


def test_why_fewer_nodes_do_not_go_on() -> None:
    cannot = replace(BUDGET, nodes=3, no_fewer="tensor_parallel: 2 ranks are too few")
    assert decide(LOST, [], cannot) == Verdict(
        step=Step.REQUEUE,
        why="a node is lost, and no spare is left; with 2 nodes it cannot go on: "
        "tensor_parallel: 2 ranks are too few",
    )
    assert decide(replace(KILLED, node=1, step=9), [KILLED], cannot).step is Step.RESTART


def test_a_node_that_fails_twice_is_replaced() -> None:
    """Only the first failures of its own ranks count; without a spare they restart as before."""
    spared = replace(BUDGET, spares=1)
    first = replace(KILLED, node=1)
    second = replace(first, step=20)
    assert decide(first, [], spared).step is Step.RESTART
    verdict = decide(second, [first], spared)
    assert verdict.step is Step.REPLACE and verdict.why.startswith("n2 has failed 2 times")
    assert decide(second, [first], BUDGET).step is Step.RESTART
    assert decide(second, [replace(first, host="n3")], spared).step is Step.RESTART
    assert decide(replace(second, node=0), [first], spared).step is Step.RESTART
    # The same failure at the same step is not the node's: it would occur on another one, too.
    assert decide(replace(second, step=8), [first], spared).step is Step.REQUEUE


def test_which_failures_count_against_a_node() -> None:
    """Hangs do not, as their node is unknown, nor failures caused by another node's failure."""
    assert worn([KILLED, LOST]) == ["n2"]
    assert worn([KILLED, replace(LOST, host="n3")]) == []
    assert worn([replace(KILLED, code=86)] * 2) == []
    assert worn([replace(KILLED, is_cause=False)] * 2) == []
    assert worn([replace(KILLED, host="")] * 2) == []


def test_a_decision_goes_to_the_other_nodes_and_back() -> None:
    decision = Decision(KILLED, decide(KILLED, [], BUDGET))
    assert Decision.of(decision.text) == decision


def test_the_page_has_every_step(root: Path) -> None:
    page = (root / "docs" / "training" / "failures.md").read_text()
    for step in (Step.RESTART, Step.REPLACE, Step.SHRINK, Step.REQUEUE, Step.GIVE_UP):
        assert f"**{step.value}**" in page
    for code in job_log.MEANING:
        assert re.search(rf"[( ]{code}[,)]", page) or code < 2, code


@pytest.mark.parametrize(("node", "hours"), [(0, 0), (1, 12)])
def test_nodes_whose_ranks_have_ended_wait_for_that_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, node: int, hours: int
) -> None:
    """Only rank 0 writes the trained model, and srun would end it soon after another node ended."""
    waited: list[float] = []
    agent = object.__new__(InPlaceAgent)
    agent._exit_barrier_timeout = 300.0
    monkeypatch.setattr(agent, "_worker_group", SimpleNamespace(group_rank=node), raising=False)
    monkeypatch.setattr(InPlaceAgent, "_publish_stop", lambda self: None)
    monkeypatch.setattr(
        LocalElasticAgent,
        "_exit_barrier",
        lambda self: waited.append(self._exit_barrier_timeout),
    )
    agent._exit_barrier()
    assert waited == [hours * 3600 or 300]
