"""Failed processes are restarted in place: by torchrun, with real training, on one node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import processes, warm
from tests.support.node_program import SLURM, Launch
from tests.support.ports import free_ports
from tests.support.run_folders import facts
from tests.training.support.jobs import last_step, records
from tests.training.support.runs import ROOT, TINY, kill_tree, losses, train, wait_for, write_text

pytestmark = pytest.mark.processes

ENTRY_POINT = ("--module", "entry", "--nproc", "2", "--")
STEPS = 150


@pytest.fixture
def launch(tmp_path: Path, root: Path) -> Launch:
    return Launch(tmp_path, root)


# With a trivial entry point.


def test_a_killed_process_is_started_again(launch: Launch, tmp_path: Path) -> None:
    follow = str(tmp_path / "follow")
    code, out, err = launch.run(*ENTRY_POINT, "0", "once-die", RESTARTS="1", FOLLOW=follow)
    assert code == 0, err
    assert re.search(r"^training.launch: rank 1 \(process \d+\) was killed by SIGKILL$", err, re.M)
    assert (
        "restart in place: rank 1 was killed by SIGKILL before the first step: restart 1 of 1"
        in (err)
    )
    assert out.count("1 of 2 1") == 2 and re.search("RESTARTS +1 ", out)


def test_the_same_failure_twice_ends_it(launch: Launch) -> None:
    code, out, err = launch.run(*ENTRY_POINT, "0", "die", RESTARTS="3")
    assert code == 137
    assert out.count("1 of 2 1") == 2
    assert "give up: rank 1 was killed by SIGKILL before the first step: it failed before" in err


def test_failures_of_several_kinds_until_the_last_restart(launch: Launch, tmp_path: Path) -> None:
    follow = str(tmp_path / "follow")
    code, out, err = launch.run(*ENTRY_POINT, "4", "once-die", RESTARTS="1", FOLLOW=follow)
    assert code == 4
    assert out.count("1 of 2 1") == 2 and "of RESTARTS=1 none is left" in err


@pytest.mark.parametrize(("what", "code"), [(("2", "2"), 2), (("85", "85"), 85), (("3", "3"), 3)])
def test_what_ends_a_job_is_not_tried_again(
    launch: Launch, what: tuple[str, str], code: int
) -> None:
    got, out, err = launch.run(*ENTRY_POINT, *what, RESTARTS="3")
    assert got == code
    assert out.count("0 of 2 1") == 1 and "restart in place" not in err


def test_a_stopped_neighbour_is_not_waited_for_long(launch: Launch) -> None:
    """Torchrun sends it SIGTERM, which a stopped process does not even see, and waits for 30 s."""
    begun = time.monotonic()
    with launch.start(*ENTRY_POINT, "sleep", "sleep", RESTARTS="1") as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += "ready" in process.stdout.readline()
        first, second = ranks(process.pid, "entry")
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        begun = time.monotonic()
        while ready < 4:
            ready += "ready" in process.stdout.readline()
        took = time.monotonic() - begun
        assert not {first, second} & set(processes.descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 85, err
    assert took < 30


LATE_STOP = """\
import os, sys
from training import launch
from training.job import agent
from training.job.restart.elastic import InPlaceAgent

restart = InPlaceAgent._restart_workers

def restart_once_asked(self, group):  # the request comes when no rank runs
    if os.environ["SLURM_NODEID"] == "0":
        agent._Stop.asked = True
    restart(self, group)

InPlaceAgent._restart_workers = restart_once_asked
sys.exit(launch.main(sys.argv[1:]))
"""
EARLIER_STOP = """\
import os, sys, time
from training import launch
from training.job import agent
from training.job.restart.elastic import InPlaceAgent

decide = InPlaceAgent._restarts

def decide_once_asked(self, result):  # after the node has decided whose rank was killed
    if all(one.exitcode == 1 for one in result.failures.values()):
        time.sleep(3)
        agent._Stop.asked = True
    return decide(self, result)

InPlaceAgent._restarts = decide_once_asked
sys.exit(launch.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("stop", "first_rank"), [(LATE_STOP, "sleep"), (EARLIER_STOP, "follow")])
def test_one_node_is_asked_to_stop_while_all_start_again(
    launch: Launch, tmp_path: Path, stop: str, first_rank: str
) -> None:
    """No other node starts ranks, which would wait for those of the one that stops."""
    (tmp_path / "late_stop.py").write_text(stop)
    here = {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    here |= {"PREFLIGHT": "0", "RESTARTS": "1", "FOLLOW": str(tmp_path / "follow")}
    words = ("--module", "entry", "--nproc", "1", "--", first_rank, "once-die")
    with launch.start(*words, program="late_stop", **here) as second:
        here["SLURM_NODEID"] = "0"
        with launch.start(*words, program="late_stop", **here) as first:
            _, err = first.communicate(timeout=300)
        out_second, err_second = second.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (85, 85), err + err_second
    assert out_second.count("1 of 2") == 1
    assert all(
        "asked to stop before the ranks were started again" in one for one in (err, err_second)
    )


def test_what_a_person_has_to_fix_on_one_node_ends_all_nodes_with_its_code(
    launch: Launch, tmp_path: Path
) -> None:
    """A launcher that outlives its nodes goes by node 0, whose own rank just ends with 1."""
    here = {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    here |= {"RESTARTS": "1", "FOLLOW": str(tmp_path / "follow")}
    words = ("--module", "entry", "--nproc", "1", "--", "once-2", "follow")
    with launch.start(*words, **here) as second:
        here["SLURM_NODEID"] = "0"
        with launch.start(*words, **here) as first:
            out, err = first.communicate(timeout=300)
        _, err_second = second.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (2, 2), err + err_second
    assert out.count(" of 2 1") == 1 and "restart in place" not in err


def test_a_wrong_number_of_restarts(launch: Launch) -> None:
    code, _, err = launch.run(*ENTRY_POINT, "0", "0", RESTARTS="often")
    assert code == 2 and "RESTARTS: must be a whole number, not 'often'" in err


# With real training.


@contextmanager
def job(
    save: Path, data: str, *other: str, nproc: int = 2, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Run ranks of a tiny model as Slurm job 4242; their output is in the file `said` beside it."""
    outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    slurm = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "1", "NODES": "n1", "REQUEUES": "1"}
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHECKPOINTS": str(save)}
    port = {"MASTER_PORT": str(free_ports(1)[0]), "PREFLIGHT": "0"}
    flags = (*TINY, f"--save_ckpt_path={save}", f"--dataset_path={data}", "--batch_size=2")
    more = (f"--num_steps={STEPS}", "--report_interval=1", "--checkpoint_interval=4")
    watched = ("--hang_seconds=2", "--hang_abort_seconds=4")
    words = ("-m", "training.launch", "--nproc", str(nproc), "--", *flags, *more, *watched, *other)
    python = warm.python()
    with (save.parent / "said").open("a") as said:
        process = subprocess.Popen(
            [python["PYTHON_EXEC"], *words],
            env={**outside, **python, **slurm, **here, **port, "RESTARTS": "9", **env},
            stdout=said,
            stderr=said,
            text=True,
        )
        try:
            yield process
        finally:
            kill_tree(process)
            process.wait()


def ranks(above: int, module: str = "training.mamba_fsdp") -> list[int]:
    """Return the training processes below one, in the order of their ranks."""
    found = {}
    for pid in processes.descendants(above):
        if f"-m {module}" in processes.command(pid):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next(word for word in words if word.startswith(b"RANK="))
            found[rank] = processes.program(pid)
    return [pid for _, pid in sorted(found.items())]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("undisturbed") / "save", data, 2, 2, STEPS)


def test_a_handful_of_kills(data: str, tmp_path: Path, undisturbed: list[float]) -> None:
    """Of one rank or the other, at increasing steps: the run ends as if nothing had happened."""
    save = tmp_path / "save"
    with job(save, data, PREFLIGHT="1") as process:
        for number, (step, victim) in enumerate(((6, 1), (15, 0), (22, 1), (37, 0), (45, 0))):
            assert wait_for(lambda: last_step(save) >= step, process, 120)  # noqa: B023
            pids = ranks(process.pid)
            os.kill(pids[victim], signal.SIGKILL)
            killed = time.time()
            assert wait_for(
                lambda: len(records(save, "training")) == number + 2,  # noqa: B023
                process,
                120,
            )
            back = records(save, "training")[-1]["time"] - killed
            print(f"kill -9 of rank {victim}: the first step {back:.1f} s after it")
            assert not set(pids) & set(processes.descendants(process.pid))
        assert process.wait(300) == 0, (tmp_path / "said").read_text()
    assert losses(save) == undisturbed
    failures = records(save, "failure")
    assert [one["code"] for one in failures] == [137] * 5
    assert [one["then"] for one in failures] == ["restart in place"] * 5
    back_at = records(save, "training")[1:]
    assert [two["lost"] for two in back_at] == [
        one["step"] - two["step"] for one, two in zip(failures, back_at, strict=True)
    ]
    said = (tmp_path / "said").read_text()
    assert said.count("resumed from") == 5 and said.count("training.preflight: 1 node") == 1
    assert re.search(r"\d\.\d% of the job's time was training", said.splitlines()[-1])
    shown = facts(save)
    assert 0.0 < shown["goodput"] < 1.0 and shown["state"] == "done"
    assert len(shown["jobs"][0]["starts"][0]["failures"]) == 5


def test_a_rank_that_hangs(data: str, tmp_path: Path, undisturbed: list[float]) -> None:
    save = tmp_path / "save"
    with job(save, data) as process:
        assert wait_for(lambda: last_step(save) >= 6, process, 120)
        os.kill(ranks(process.pid)[1], signal.SIGSTOP)
        assert process.wait(300) == 0, (tmp_path / "said").read_text()
    assert losses(save) == undisturbed
    [failure] = records(save, "failure")
    assert failure["code"] == 86 and "no progress" in failure["why"]


def test_the_same_failure_at_the_same_step(data: str, tmp_path: Path) -> None:
    """A NaN loss occurs again; then its launcher has the job requeued."""
    save = tmp_path / "save"
    with job(save, data, "--learning_rate=1e30") as process:
        assert process.wait(300) == 1
    first, second = records(save, "failure")
    assert (first["step"], first["then"]) == (second["step"], "restart in place")
    assert second["then"] == "requeue" and "in the same way before" in second["because"]
    with job(save, data, "--learning_rate=1e30", SLURM_RESTART_COUNT="1") as process:
        assert process.wait(300) == 1
    [*_, third] = records(save, "failure")
    assert third["then"] == "give up" and third["restarted"] == 0
    assert third["because"].endswith("of REQUEUES none is left")
    assert facts(save)["state"] == "failed"


def test_asked_to_stop_while_it_starts_again(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    save = tmp_path / "save"
    with job(save, data) as process:
        assert wait_for(lambda: last_step(save) >= 6, process, 120)
        os.kill(ranks(process.pid)[1], signal.SIGKILL)
        assert wait_for(lambda: records(save, "failure"), process, 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 85, (tmp_path / "said").read_text()
    with job(save, data, SLURM_RESTART_COUNT="1") as process:
        assert process.wait(300) == 0, (tmp_path / "said").read_text()
    assert losses(save) == undisturbed
    assert len(records(save, "failure")) == 1
    ends = [one["code"] for one in records(save, "end")]
    assert ends == [85, 0]
