"""A job with spare nodes: a node is lost with all its processes, and a spare takes its place.

Three agents on this machine are the nodes; each has its processes killed, or stopped like those of
a crashed machine, in which case nothing notifies the others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import processes, warm
from tests.support.ports import free_ports
from tests.support.run_folders import facts
from tests.training.support.jobs import last_step, records
from tests.training.support.runs import ROOT, TINY, kill_tree, losses, train, wait_for, write_text

pytestmark = pytest.mark.processes

STEPS = 60
WATCHED = ("--hang_seconds=60", "--hang_abort_seconds=120")
"""No watch ends a rank before its node is known to be lost."""


@dataclass
class Nodes:
    """The agents of a job, by their places, and the run's folder."""

    agents: list[subprocess.Popen[str]]
    save: Path

    def ranks(self, node: int) -> list[int]:
        """Return the training processes of a node."""
        below = processes.descendants(self.agents[node].pid)
        found = [pid for pid in below if "-m training.mamba_fsdp" in processes.command(pid)]
        return [processes.program(pid) for pid in found]

    def kill(self, node: int) -> None:
        kill_tree(self.agents[node])

    def stop(self, node: int) -> None:
        """Stop a node from doing anything, without closing its connections."""
        pid = self.agents[node].pid
        for one in (pid, *processes.descendants(pid)):
            os.kill(one, signal.SIGSTOP)

    def wake(self, node: int) -> None:
        pid = self.agents[node].pid
        for one in (*processes.descendants(pid), pid):
            os.kill(one, signal.SIGCONT)

    def reach(self, step: int) -> None:
        assert wait_for(lambda: last_step(self.save) >= step, self.agents[0], 300), self.said()

    def end(self) -> int:
        """Wait until node 0 has ended; returns its exit code."""
        return self.agents[0].wait(300)

    def said(self, node: int | None = None) -> str:
        of = range(len(self.agents)) if node is None else (node,)
        return "".join((self.save.parent / f"said.{one}").read_text() for one in of)


@contextmanager
def job(save: Path, data: str, *other: str, **env: str) -> Iterator[Nodes]:
    """Run one rank per node of a tiny model, on two nodes and a spare, as Slurm job 4242."""
    save.mkdir(exist_ok=True)
    outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    slurm = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "3", "REQUEUES": "1"}
    meet = {"NODES": "n1 n2 n3", "MASTER_ADDR": "127.0.0.1", "PREFLIGHT": "0"}
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHECKPOINTS": str(save)}
    python = warm.python()
    spares = {"SPARES": "1", "MASTER_PORT": str(free_ports(1)[0])}
    flags = (*TINY, f"--save_ckpt_path={save}", f"--dataset_path={data}", "--batch_size=2")
    more = (f"--num_steps={STEPS}", "--report_interval=1", "--checkpoint_interval=4")
    words = ("-m", "training.launch", "--nproc", "1", "--", *flags, *more, *WATCHED, *other)
    (save / ".job-4242.0").mkdir(exist_ok=True)
    processes.leave_room_for_numbers()
    with ExitStack() as undo:
        agents = []
        for node in range(3):
            own = {"SLURM_NODEID": str(node)}
            said = undo.enter_context((save.parent / f"said.{node}").open("a"))
            process = subprocess.Popen(
                [python["PYTHON_EXEC"], *words],
                env=outside | python | slurm | meet | here | spares | own | env,
                stdout=said,
                stderr=said,
                text=True,
            )
            undo.callback(process.wait)
            undo.callback(kill_tree, process)
            agents.append(process)
            # Torchrun numbers the nodes of one address in the order of their processes' ids.
            assert wait_for(lambda: processes.program(process.pid) != process.pid, process)  # noqa: B023
        yield Nodes(agents, save)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("undisturbed") / "save", data, 2, 2, STEPS)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_spare_takes_the_place_of_a_lost_node(
    data: str, tmp_path: Path, undisturbed: list[float], how: str
) -> None:
    save = tmp_path / "save"
    with job(save, data) as nodes:
        nodes.reach(6)
        assert len(nodes.ranks(1)) == 1 and nodes.ranks(2) == []
        getattr(nodes, how)(1)
        lost = time.time()
        assert wait_for(lambda: len(records(save, "training")) == 2, nodes.agents[0], 300)
        back = records(save, "training")[-1]["time"] - lost
        noted = records(save, "failure")[0]["time"] - lost
        print(f"{how}: known after {noted:.1f} s, the next step over after {back:.1f} s")
        if how == "stop":  # the machine was only slow: another one has its place by now
            nodes.wake(1)
            assert nodes.agents[1].wait(300) == 1
            assert "have not heard of each other for 12 s" in nodes.said(1)
        assert nodes.end() == 0, nodes.said()
        assert nodes.agents[2].wait(300) == 0
    assert losses(save) == undisturbed
    [failure] = records(save, "failure")
    assert (failure["host"], failure["rank"], failure["then"]) == ("n2", None, "spare node")
    said = nodes.said(0)
    assert "spare node: n2 is lost: it has given no sign of life for 12 s after step" in said
    assert re.search(r"goes on after step \d+, .* after the last step; .*\d+ steps \(", said)
    assert "node 2, a spare, takes the place of another" in nodes.said(2)
    assert (save / ".job-4242.0" / "lost.n2").exists()
    assert (save / ".job-4242.0" / "ended.0").read_text() == "0\n"
    shown = facts(save)
    assert shown["state"] == "done" and len(shown["jobs"][0]["starts"][0]["failures"]) == 1


def test_the_node_of_rank_0_is_lost(data: str, tmp_path: Path, undisturbed: list[float]) -> None:
    """What is left of it holds the run's folder, and must not keep it."""
    save = tmp_path / "save"
    # The ranks are in the order of the addresses; the other nodes have 127.0.0.1.
    with job(save, data, MASTER_ADDR="127.0.0.2") as nodes:
        nodes.reach(6)
        assert "step 1/" in nodes.said(1)
        nodes.stop(1)
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed
    [failure] = records(save, "failure")
    assert (failure["host"], failure["then"]) == ("n2", "spare node")
    assert "the job goes on without the node of that process" in nodes.said()


def test_a_node_that_fails_twice_gives_its_place_to_a_spare(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Its container lives, and could restart ranks; it is also excluded from the next start."""
    save = tmp_path / "save"
    with job(save, data, RESTARTS="3") as nodes:
        for number, step in enumerate((6, 20)):
            nodes.reach(step)
            os.kill(nodes.ranks(1)[0], signal.SIGKILL)
            assert wait_for(
                lambda: len(records(save, "training")) == number + 2,  # noqa: B023
                nodes.agents[0],
                300,
            )
        assert nodes.agents[1].wait(300) == 137
        assert len(nodes.ranks(2)) == 1
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed
    assert [one["then"] for one in records(save, "failure")] == ["restart in place", "spare node"]
    assert "n2: failed 2 times in this job" in nodes.said(0)
    assert (save / "bad-nodes.4242.0").read_text() == "n2\n"


def test_a_node_that_has_failed_twice_waits(data: str, tmp_path: Path) -> None:
    """In a later start of the job, even if nobody else is left at its end."""
    save = tmp_path / "save"
    (save / "jobs").mkdir(parents=True)
    failed = {"kind": "failure", "time": 1.0, "rank": None, "code": 87, "host": "n2"}
    begun = {"kind": "start", "time": 0.5, "restart": 0}
    lines = (begun, failed | {"step": 4}, failed | {"step": 8})
    (save / "jobs" / "4242.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    with job(save, data, SLURM_RESTART_COUNT="1") as nodes:
        nodes.reach(6)
        assert [len(nodes.ranks(node)) for node in range(3)] == [1, 0, 1]
        nodes.kill(2)
        assert nodes.end() == 1
        assert nodes.agents[1].wait(300) in (0, 1)
    assert "n3 is lost" in nodes.said(0) and "no spare is left" in nodes.said(0)


def test_a_spare_is_lost(data: str, tmp_path: Path, undisturbed: list[float]) -> None:
    """Only the log shows it, and the job ends although nothing answers there."""
    save = tmp_path / "save"
    with job(save, data) as nodes:
        nodes.reach(4)
        nodes.stop(2)
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed and records(save, "failure") == []


def test_asked_to_stop(data: str, tmp_path: Path, undisturbed: list[float]) -> None:
    """The spare ends with the others."""
    save = tmp_path / "save"
    with job(save, data) as nodes:
        nodes.reach(6)
        (save / ".job-4242.0" / "stop").write_text("TERM\n")
        assert nodes.end() == 85, nodes.said()
        assert nodes.agents[1].wait(300) == 85 and nodes.agents[2].wait(300) == 0
        assert "was a spare, and was not needed" in nodes.said(2)
    (save / ".job-4242.0" / "stop").unlink()
    with job(save, data) as nodes:
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed


SHORT_OF_MEMORY = """\
import os

if os.environ.get("RANK") and os.environ.get("{name}") == "{value}":
    from training.checkpoint import free_memory

    free_memory.free_in = lambda folder: 1
"""
"""A sitecustomize.py: ranks with this variable find no space for copies of checkpoints."""


def short_of_memory(folder: Path, name: str, value: str) -> str:
    """Return the PYTHONPATH of such ranks."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SHORT_OF_MEMORY.format(name=name, value=value))
    return f"{folder}:{ROOT}"


def test_a_spare_without_room_for_copies_goes_on_without_them(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    save, path = tmp_path / "save", short_of_memory(tmp_path / "site", "SLURM_NODEID", "2")
    with job(save, data, "--checkpoint_in_memory=True", PYTHONPATH=path, RESTARTS="3") as nodes:
        nodes.reach(6)
        nodes.kill(1)
        assert nodes.end() == 0, nodes.said()
    assert losses(save) == undisturbed
    assert "checkpoint_in_memory=True: on" in nodes.said(0)
    assert "checkpoint_in_memory=True: off, as two copies" in nodes.said(0)
