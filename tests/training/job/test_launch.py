"""The node's program: real torchrun, trivial processes, exit codes, signals."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import json_lines, processes
from tests.support.node_program import SLURM, Launch
from tests.support.ports import free_ports
from training.job.agent import outcome

pytestmark = pytest.mark.processes

LIMITED = """\
import resource

def configure(flags):
    pass

if __name__ == "__main__":
    files, stack = resource.RLIMIT_NOFILE, resource.RLIMIT_STACK
    print("limits", resource.getrlimit(files)[0], resource.getrlimit(stack)[0])
"""

FAILING = """\
import os

def configure(flags):
    pass

def work():
    from training.process_group import start
    group = start("cpu")
    if group.rank == 1:
        raise ValueError("the loss is gone\\nand more")
    group.barrier()

if __name__ == "__main__":
    from training.entrypoint import exit_code, leave
    leave(exit_code(work))
"""


SLOW_TO_END = """\
import atexit, os, sys, time

def configure(flags):
    pass

def work():
    if os.environ["RANK"] == "1":
        from training.errors import {kind}
        atexit.register(time.sleep, 600)
        raise {kind}("the loss is gone", local=True)
    while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/", "/1/")):
        time.sleep(0.1)
    sys.exit(1)

if __name__ == "__main__":
    from training.entrypoint import exit_code
    sys.exit(exit_code(work))
"""


@pytest.fixture
def launch(tmp_path: Path, root: Path) -> Launch:
    return Launch(tmp_path, root)


def test_processes_run_and_end(launch: Launch) -> None:
    code, out, err = launch.entry("0", "0")
    assert code == 0, err
    assert re.search("NPROC_PER_NODE +2 +--nproc", out)
    assert "0 of 2 1" in out and "1 of 2 1" in out


@pytest.mark.parametrize(
    ("what", "code", "shown"),
    [
        (("85", "85"), 85, r"\d .*: saved and stopped, as SIGTERM asked"),
        (("2", "2"), 2, r"\d .*: wrong request"),
        (("86", "86"), 86, r"\d .*: no progress, ended by the watch"),
        (("0", "die"), 137, "1 .* was killed by SIGKILL"),
    ],
)
def test_exit_code_is_that_of_the_processes(
    launch: Launch, what: tuple[str, str], code: int, shown: str
) -> None:
    got, _, err = launch.entry(*what)
    assert got == code
    assert re.search(f"training.launch: rank {shown}", err)


def test_the_cause_of_a_failure_is_reported_again_at_the_end(
    launch: Launch, tmp_path: Path
) -> None:
    """The first rank to fail is named, with its own words; those that followed get a line each."""
    (tmp_path / "failing.py").write_text(FAILING)
    code, _, err = launch.run("--module", "failing", "--nproc", "2", "--")
    assert code == 1
    last = [line for line in err.splitlines() if line.startswith("training.launch: rank ")]
    assert re.fullmatch(
        r"training.launch: rank 1 \(process \d+\) ended with exit code 1: "
        "ValueError: the loss is gone",
        last[0],
    )
    assert err.count("Traceback") == 1 and len(last) <= 2


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize(("kind", "code"), [("TrainingError", 1), ("RequestError", 2)])
def test_the_cause_of_a_failure_may_be_the_last_to_end(
    launch: Launch, tmp_path: Path, kind: str, code: int, restarts: str
) -> None:
    """Torchrun then ends it, but that is not how it failed: a wrong request remains one."""
    (tmp_path / "failing.py").write_text(SLOW_TO_END.format(kind=kind))
    words = ("--module", "failing", "--nproc", "2", "--")
    got, _, err = launch.run(*words, RESTARTS=restarts)
    assert got == code, err
    shown = re.findall(r"^training.launch: rank (\d) .* exit code (\d)(.*)$", err, re.MULTILINE)
    assert shown[0][:2] == ("1", str(code)) and shown[0][2].endswith(": the loss is gone"), err
    assert err.count("restart in place:") == (restarts == "1" and code == 1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_lets_the_processes_save(launch: Launch, how: signal.Signals) -> None:
    with launch.start("--module", "entry", "--nproc", "2", "--", "sleep", "sleep") as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += "ready" in process.stdout.readline()
        process.send_signal(how)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 85, err
    assert out.count("saved") == 2


def test_the_second_ctrl_c_ends_at_once(launch: Launch, tmp_path: Path) -> None:
    words = ("--module", "entry", "--nproc", "2", "--", "sleep", "sleep")
    with launch.start(*words, CHECKPOINTS=str(tmp_path), SAVING="60") as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += "ready" in process.stdout.readline()
        ranks = processes.descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "Ctrl-C again ends it at once" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert err.endswith("interrupted\n") and "saved" not in out
    assert not any(processes.command(one) for one in ranks)
    [noted] = json_lines.read(tmp_path / "jobs/local.jsonl", "end")
    assert noted["code"] == 130


def test_ctrl_c_before_there_are_ranks(launch: Launch) -> None:
    words = ("--module", "entry", "--nproc", "2", "--", "sleep", "sleep", "--slow")
    with launch.start(*words) as process:
        assert process.stdout is not None and "node 0 of 1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_the_launcher_asks_to_stop(launch: Launch, tmp_path: Path) -> None:
    """It uses a file, so no process of the container is signaled; it also learns who started."""
    folder = tmp_path / ".job-4242.0"
    folder.mkdir()
    (folder / "stop").touch()
    job = {"SLURM_JOB_ID": "4242", "NODES": "n1", "MASTER_PORT": str(free_ports(1)[0])}
    env = job | {"CHECKPOINTS": str(tmp_path), "LAUNCHED_AT": "1"}
    words = ("--module", "entry", "--nproc", "2", "--", "sleep", "sleep")
    with launch.start(*words, **env) as process:
        assert process.stdout is not None
        ready, before = 0, ""
        while ready < 2:
            line = process.stdout.readline()
            ready += "ready" in line
            before += line
        assert sorted(path.name for path in folder.iterdir()) == ["started.0", "stop"]
        (folder / "stop").write_text("TERM\n")
        out, err = process.communicate(timeout=300)
    assert process.returncode == 85, err
    assert out.count("saved") == 2
    assert re.search(r"^training.launch: the container is up, \d+ s after srun$", before, re.M)


def test_a_signal_that_was_ignored_until_now(launch: Launch) -> None:
    """The launcher makes enroot's own processes ignore it; existing processes are left alone."""
    shell = 'sleep 600 & trap "" TERM USR1; exec "$@"'
    words = ("--module", "entry", "--nproc", "2", "--", "sleep", "sleep")
    with launch.start(*words, before=["bash", "-c", shell, "-"]) as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += "ready" in process.stdout.readline()
        found = processes.descendants(process.pid)
        [beside] = [pid for pid in found if processes.command(pid).startswith("sleep")]
        try:
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 85
            assert processes.command(beside).startswith("sleep"), "it was signalled"
        finally:
            os.kill(beside, signal.SIGKILL)
        assert process.communicate()[0].count("saved") == 2


def test_under_nohup_a_hangup_is_ignored(launch: Launch) -> None:
    """Alone, torchrun handles SIGHUP even if it was ignored at its start."""
    words = ("--module", "entry", "--nproc", "2", "--", "sleep", "sleep")
    with launch.start(*words, before=["nohup"]) as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += "ready" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 85, err
    assert out.count("saved") == 2 and "SIGHUP" not in err


def test_print_env_starts_nothing(launch: Launch) -> None:
    code, out, err = launch.run("--print-env", "--", "--model_name=x", NPROC_PER_NODE="4")
    assert (code, err) == (0, "")
    assert re.search("NPROC_PER_NODE +4", out) and "-m training.mamba_fsdp --model_name=x" in out


def test_wrong_flags_are_refused_before_torch_is_loaded(launch: Launch) -> None:
    begun = time.monotonic()
    code, out, err = launch.run("--", "--num_step=5")
    assert code == 2 and out.startswith("training.launch: node 0 of 1")
    assert err.startswith("error: ") and "did you mean --num_steps" in err
    assert "Traceback" not in err and time.monotonic() - begun < 60


def test_one_node_of_many_tells_what_is_wrong(launch: Launch) -> None:
    first, second = (
        launch.run("--module", "entry", "--", "--wrong", **(SLURM | {"SLURM_NODEID": rank}))
        for rank in ("0", "1")
    )
    assert (first[0], second[0]) == (2, 2)
    assert "--wrong" in first[2] and second[2] == ""


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("--module", "entry", "--nproc", "2", "--", "3", "0"), {}),
        (("--module", "entry", "--", "--wrong"), {}),
        (("--module", "entry", "--"), {"NPROC_PER_NODE": "none"}),  # before there is a plan
    ],
)
def test_the_launcher_learns_how_the_node_ended(
    launch: Launch, tmp_path: Path, words: tuple[str, ...], env: dict[str, str]
) -> None:
    folder = tmp_path / ".job-4242.0"
    folder.mkdir()
    here = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "1", "CHECKPOINTS": str(tmp_path)}
    code, _, err = launch.run(*words, **here, **env)
    assert code in (2, 3), err
    assert (folder / "ended.0").read_text() == f"{code}\n"


def test_the_entry_point_of_composer(launch: Launch, tmp_path: Path) -> None:
    """Its file is read before anything starts; then it is started, but Composer is missing here."""
    file = tmp_path / "config.yaml"
    words = ("--module", "training.mamba_composer", "--nproc", "2", "--", str(file))
    file.write_text("data: {text_paths: [{path: none.npy, weigth: 1}]}")
    code, _, err = launch.run(*words)
    assert code == 2 and err.startswith(f"error: {file}: data.text_paths: entry 1: must have path")
    file.write_text("data: {text_paths: [{path: none.npy, weight: 1}]}")
    code, _, err = launch.run(*words)
    assert code == 2 and "rank 0" in err
    assert "fix: use the image of target composer-mamba, or pip install mosaicml" in err


def test_limits_are_raised(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    starts = [f"exec {sys.executable} -m training.launch --module limited --"]
    done = subprocess.run(
        ["bash", "-c", "; ".join(["ulimit -S -n 200", "ulimit -S -s 4096", *starts])],
        env=launch.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, stack = resource.getrlimit(resource.RLIMIT_STACK)
    assert f"limits {files} {stack}\n" in done.stdout
    assert re.search(
        f"  limits +as high as allowed +nofile {files}, .*nofile, stack raised", done.stdout
    )


@pytest.mark.parametrize("module", ["training.nothing", "no.such", "training.errors"])
def test_a_module_that_is_no_entry_point(launch: Launch, module: str) -> None:
    code, _, err = launch.run("--module", module, "--")
    assert code == 2 and f"--module: {module} cannot be started" in err


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([85, 85], 85),
        ([85, 1], 1),  # one that could not save
        ([2, -15], 2),
        ([1, 86, -15], 86),  # the others' codes resulted from a hang
        ([86, 2], 2),
        ([-15, 2], 2),
        ([-9, 1], 137),  # the first failure
        ([1, -9], 1),
    ],
)
def test_exit_code_of_a_node(codes: list[int], code: int) -> None:
    assert outcome(codes) == code
