"""What a job records of its failures and their cost, and how `sqshforge status` shows it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.run_folders import HOUR, age, facts, history, plan, write
from training.job import job_log
from training.job.restart.escalation import Budget, Failure, Step, Verdict, decide, worn
from training.job.restart.ledger import Ledger, Outage
from training.job.restart.steps import StepNotes, StepReader, Steps

KILLED = Failure(rank=1, code=137, step=50, why="rank 1 was killed by SIGKILL", host="n2")


def begin(run: Path, restart: int = 0, before: float = 0.0) -> Ledger:
    """Begin a start of job 4242 that is dated `before` seconds ago."""
    described = plan(run, restart=restart)
    job_log.begin(described, {"NODES": "n1 n2", "REQUEUES": "3"})
    path = run / "jobs" / "4242.jsonl"
    *lines, last = path.read_text().splitlines()
    moved = json.loads(last)
    moved["time"] -= before
    path.write_text("".join(f"{line}\n" for line in (*lines, json.dumps(moved))))
    return Ledger(described.job, job_log.folders(described, {}))


def steps(resumed: int, last: int, first_at: float, last_at: float) -> Steps:
    return Steps(resumed=resumed, last=last, first_at=first_at, last_at=last_at)


def shown(run: Path) -> list[str]:
    """Return the lines that `sqshforge status` prints for a run."""
    from sqshforge.status.report import lines
    from sqshforge.status.run import Clock, look

    return [" ".join(one.split()) for one in lines(look(run, Clock.of(run)))]


def test_a_restart_in_place_and_what_it_cost(tmp_path: Path) -> None:
    """Trains from a minute after the start, an hour ago; loses 40 s, and repeats 10 steps."""
    run, now = write(tmp_path / "run", history(50)), time.time()
    ledger = begin(run, before=HOUR)
    assert ledger.outage().since == pytest.approx(now - HOUR, abs=5)
    ledger.trains(steps(0, 1, now - HOUR + 60, now - HOUR + 60), ledger.outage(), 0)
    ledger.failed(KILLED, decide(KILLED, [], Budget(restarts=3)), 0, 2.0)
    shown = facts(run)
    assert shown["why"] == "restart in place after a failure: rank 1 was killed by SIGKILL"
    outage = Outage(since=now - 40, step=50, step_seconds=2.0)
    said = ledger.trains(steps(40, 41, now, now), outage, 1)
    assert said.startswith("goes on after step 40, 40 s after the last step; 10 steps (20 s)")
    shown = facts(run)
    assert shown["state"] == "running"
    start = shown["jobs"][0]["starts"][0]
    [failure] = start["failures"]
    assert failure["step"] == 50 and failure["host"] == "n2" and failure["code"] == 137
    assert failure["then"] == "restart in place"
    assert failure["cost"]["seconds"] == 40.0 and failure["cost"]["lost"] == 10
    assert failure["cost"]["repeated"] == 20.0 and len(start["trained"]) == 2
    assert shown["goodput"] == pytest.approx(1 - (60 + 40 + 20) / HOUR, abs=0.002)


def test_a_requeue_goes_on_with_the_account(tmp_path: Path) -> None:
    run, now = write(tmp_path / "run", history(50)), time.time()
    ledger = begin(run, before=1000)
    ledger.trains(steps(0, 1, now - 1000, now - 1000), ledger.outage(), 0)
    failure = Failure(**{**KILLED.record(), "since": now - 300})
    requeue = Verdict(step=Step.REQUEUE, why="of RESTARTS=3 none is left")
    ledger.failed(failure, requeue, 3, 0.5)
    job_log.end(plan(run), {}, 137)
    assert facts(run)["goodput"] == pytest.approx(0.7, abs=0.01)  # it has not trained since
    ledger = begin(run, restart=1)
    assert ledger.outage() == Outage(since=now - 300, step=50, step_seconds=0.5)
    assert [one.is_like(KILLED) for one in ledger.failures()] == [True]
    ledger.trains(steps(40, 41, now, now), ledger.outage(), 0)
    shown = facts(run)
    cost = shown["jobs"][0]["starts"][0]["failures"][0]["cost"]
    assert (cost["seconds"], cost["lost"], cost["repeated"]) == (pytest.approx(300), 10, 5.0)
    assert shown["goodput"] == pytest.approx(0.695, abs=0.01)


def test_a_lost_node_and_its_spare(tmp_path: Path) -> None:
    """Its cost is reported like any failure's; lost once more, a later start knows it as worn."""
    run, now = write(tmp_path / "run", history(50)), time.time()
    ledger = begin(run, before=HOUR)
    ledger.trains(steps(0, 1, now - HOUR, now - HOUR), ledger.outage(), 0)
    lost = Failure(rank=None, code=87, step=50, why="n2 is lost: silent", host="n2", node=1)
    ledger.failed(lost, decide(lost, [], Budget(restarts=3, spares=1)), 0, 2.0)
    assert facts(run)["why"] == "spare node after a failure: n2 is lost: silent"
    ledger.trains(steps(45, 46, now, now), Outage(since=now - 24, step=50, step_seconds=2.0), 0)
    seen = shown(run)
    assert "spare node: a node is lost, and a spare takes its place" in seen
    assert "it cost 24 s without training, 5 steps (10 s) taken again" in seen
    assert worn(ledger.failures()) == []
    ledger = begin(run, restart=1)
    ledger.failed(lost, decide(lost, [], Budget(restarts=3, requeues=3)), 0, 2.0)
    assert worn(begin(run, restart=2).failures()) == ["n2"]


def test_spares_are_kept_apart_from_nodes_that_train(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(50))
    described = plan(run)
    described = replace(described, job=replace(described.job, nodes=3, spares=1))
    job_log.begin(described, {"NODES": "n1 n2 n3"})
    seen = shown(run)
    assert "job 4242, restart 0, 2 nodes of 4 processes and 1 spare: n1 n2 n3" in seen
    start = facts(run)["jobs"][0]["starts"][0]
    assert (start["nodes"], start["spares"]) == (2, 1)


def test_a_start_that_was_killed_with_its_node(tmp_path: Path) -> None:
    """Only its metrics show how far it came."""
    run, now = write(tmp_path / "run", history(50)), time.time()
    ledger = begin(run, before=1000)
    ledger.trains(steps(0, 1, now - 900, now - 900), ledger.outage(), 0)
    age(run, 200, "metrics.jsonl")
    outage = begin(run, restart=1).outage()
    assert outage.since == pytest.approx(now - 200, abs=5) and outage.step == 50


@pytest.mark.parametrize("days", [0, 3])
def test_a_start_that_ended_before_a_step_of_a_run_of_another_job(
    tmp_path: Path, days: int
) -> None:
    """Another job's steps are no outage of this one, which opens that run's folder only now."""
    run, now = write(tmp_path / "run", history(50)), time.time()
    age(run, days * 24 * HOUR, "metrics.jsonl")
    begin(run, before=HOUR)
    job_log.end(plan(run), {}, 87)
    ledger = begin(run, restart=1, before=60)
    assert ledger.outage() == Outage(since=ledger.begun)
    assert ledger.trains(steps(50, 51, now, now), ledger.outage(), 0) == ""
    ledger = Ledger(plan(run, restart=1).job, [run])
    assert ledger.goodput(now + HOUR) == pytest.approx(0.5, abs=0.01)


def test_a_start_that_ended_before_a_step_after_one_that_trained(tmp_path: Path) -> None:
    run, now = write(tmp_path / "run", history(50)), time.time()
    ledger = begin(run, before=HOUR)
    ledger.trains(steps(0, 1, now - HOUR, now - HOUR), ledger.outage(), 0)
    failure = Failure(**{**KILLED.record(), "since": now - 300})
    ledger.failed(failure, Verdict(step=Step.REQUEUE, why="none is left"), 3, 0.5)
    job_log.end(plan(run), {}, 137)
    begin(run, restart=1, before=60)
    job_log.end(plan(run, restart=1), {}, 87)
    outage = begin(run, restart=2).outage()
    assert outage == Outage(since=now - 300, step=50, step_seconds=0.5)


def test_the_failures_of_another_run_are_not_those_of_this_one(tmp_path: Path) -> None:
    """Without Slurm, all runs in a folder share a record."""
    alone = plan(tmp_path, job="local")
    for _ in range(2):
        job_log.begin(alone, {})
        ledger = Ledger(alone.job, job_log.folders(alone, {}))
        assert ledger.failures() == [] and ledger.outage().step is None
        ledger.failed(KILLED, decide(KILLED, [], Budget(restarts=0)), 0, None)
        job_log.end(alone, {}, 137)


@pytest.mark.parametrize("text", ["", "{", "[]\n{}\n", '{"kind": "start", "time": "x"}\n\0\n'])
def test_a_record_that_is_torn_ends_no_job(tmp_path: Path, text: str) -> None:
    described = plan(tmp_path)
    path = tmp_path / "jobs" / "4242.jsonl"
    path.parent.mkdir()
    path.write_text(text)
    ledger = Ledger(described.job, job_log.folders(described, {}))
    assert ledger.failures() == []
    ledger.trains(steps(0, 1, time.time(), time.time()), ledger.outage(), 0)


def test_what_people_see(tmp_path: Path) -> None:
    run, now = write(tmp_path / "run", history(50)), time.time()
    ledger = begin(run, before=HOUR)
    ledger.trains(steps(0, 1, now - HOUR, now - HOUR), ledger.outage(), 0)
    for number in range(7):
        failure = Failure(**{**KILLED.record(), "step": 50 + number})
        ledger.failed(
            failure, decide(failure, [], Budget(restarts=9, restarted=number)), number, 1.0
        )
        outage = Outage(since=now - 30, step=50 + number, step_seconds=1.0)
        ledger.trains(steps(49 + number, 50 + number, now, now), outage, number + 1)
    seen = shown(run)
    assert "failures 7, of which the last 5 are shown" in seen
    assert any(one.endswith("after step 56: rank 1 was killed by SIGKILL on n2") for one in seen)
    assert "restart in place: restart 7 of 9 in these containers" in seen
    assert "it cost 30 s without training, 1 step (1 s) taken again" in seen
    assert any(one.startswith("goodput 94.") for one in seen)


@pytest.mark.parametrize(
    ("in_memory", "said"),
    [
        (None, ""),
        (0.0, "its state was read from disk in 2.5 s; "),
        (1.0, "its state was read from memory in 2.5 s; "),
        (0.75, "its state was read from memory (75%) and disk in 2.5 s; "),
    ],
)
def test_where_a_restart_has_its_state_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: float | None, said: str
) -> None:
    """The source is passed on from the rank's note to the log and the job's record."""
    run = write(tmp_path / "run", history(50))
    environment: dict[str, str] = {}
    reader = StepReader(environment)
    monkeypatch.setenv("STEP_NOTES", environment["STEP_NOTES"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    StepNotes(40, 2.5, in_memory).taken(41)
    found = reader.read()
    assert found is not None
    outage = Outage(since=time.time() - 40, step=50, step_seconds=2.0)
    shown = begin(run, before=HOUR).trains(found, outage, 1)
    assert f"after the last step; {said}10 steps (20 s)" in shown
    [path] = (run / "jobs").glob("*.jsonl")
    record = json.loads(path.read_text().splitlines()[-1])
    assert record["in_memory"] == in_memory
    assert record["read"] == (None if in_memory is None else 2.5)


def test_ranks_note_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the node's first rank does; the notes of a rank that has ended can still be read."""
    environment: dict[str, str] = {}
    reader = StepReader(environment)
    assert reader.read() is None
    monkeypatch.setenv("STEP_NOTES", environment["STEP_NOTES"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    StepNotes(7).taken(8)
    assert reader.read() is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    notes = StepNotes(7)
    assert reader.read() == Steps(resumed=7, last=7)
    for step in (8, 9, 10):
        notes.taken(step)
    found = reader.read()
    assert found and (found.resumed, found.last) == (7, 10) and found.seconds is not None
    assert 0 < found.first_at <= found.last_at <= time.time()
    reader.clear()
    assert reader.read() is None
    monkeypatch.setenv("STEP_NOTES", "/proc/1/fd/nothing")
    StepNotes(7).taken(8)  # nobody can read it, but nothing fails
