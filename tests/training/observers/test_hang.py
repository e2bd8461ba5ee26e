"""A rank that hangs is named, with the stacks of all; a run that is only slow is left alone."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import warm
from tests.training.support.runs import ROOT, TINY, kill_tree, rank_processes, wait_for, write_text
from training.observers.hang_report import Answer, Silence, format_hang
from training.observers.watchdog import Limits

PROGRAM = """
import os, re, sys, time
from training import mamba_fsdp
from training.data.sampler import Reader
from training.entrypoint import enter, leave
from training.loggers.text import TextLogger
from torch.profiler import profile
from training.models.language import Block

rank = int(os.environ.get("RANK", "0"))
calls = {"forward": 0, "data": 0, "close": 0, "trace": 0}

def before(what):
    calls[what] += 1
    if what == os.environ["WHERE"] and rank == int(os.environ["WHO"]):
        sit(calls[what])

def sit(call):
    kind, at = os.environ["HOW"], int(os.environ["AT"])
    if kind == "slow":
        time.sleep(0.5 if call > at else 0)
    elif call == at:
        if kind == "lock":  # computes without ever letting go of the interpreter's lock
            re.match(r"(a+)+$", "a" * 60 + "b")
        time.sleep(float(kind))

forward, next_rows = Block.forward, Reader.next_rows

def sitting_forward(self, *arguments):
    before("forward")
    return forward(self, *arguments)

def sitting_next_rows(self, rows):
    before("data")
    return next_rows(self, rows)

Block.forward, Reader.next_rows = sitting_forward, sitting_next_rows
TextLogger.close = lambda self, failed: before("close")
profile.export_chrome_trace = lambda self, path: before("trace")
own = [os.environ["OTHERS"]] if rank and "OTHERS" in os.environ else []
leave(enter(mamba_fsdp.configure, sys.argv[1:] + own))
"""


@contextmanager
def hanging(
    folder: Path, ranks: int, how: str, where: str, at: int, who: int, *flags: str, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Run training in which one rank stops working; the output is in folder/said."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    meet = ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    python = warm.python()
    argv = [python["PYTHON_EXEC"], *(launcher + meet if ranks else []), str(program)]
    shown = {"HOW": how, "WHERE": where, "AT": str(at), "WHO": str(who), **env}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [
                *argv,
                *TINY,
                f"--dataset_path={write_text(folder / 'text')}",
                f"--save_ckpt_path={folder}/save",
                "--report_interval=2",
                "--hang_seconds=3",
                *flags,
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **python, **shown},
            text=True,
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        kill_tree(process)
        process.wait()


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def wait_for_report(folder: Path, process: subprocess.Popen[str]) -> str:
    """Wait for the report, at most a minute, and return the content of its file."""
    file = folder / "save" / "hang.txt"
    assert wait_for(lambda: file.exists() and "stacks of" in file.read_text(), process), said(
        folder
    )
    return file.read_text()


@pytest.mark.processes
def test_a_rank_that_sits_in_a_block_is_named_and_the_run_ends(tmp_path: Path) -> None:
    flags = ("--num_steps=50", "--hang_abort_seconds=9")
    with hanging(tmp_path, 3, "1000", "forward", 6, 1, *flags) as process:
        text = wait_for_report(tmp_path, process)
        assert "hang: rank 1 hangs in step 3, forward, block 1 of 2; no progress for" in text
        assert "ranks 0, 2: in step 3," in text
        stuck, waiting = text.split("stacks of rank 1:")[1].split("stacks of ranks 0, 2:")
        assert stuck.splitlines()[-1].endswith("time.sleep(float(kind))")
        assert "training/trainer/trainer.py" in stuck and "training/models/language.py" in stuck
        assert (
            "training/trainer/trainer.py" in waiting
            and "program.py" not in waiting.splitlines()[-1]
        )
        assert process.wait(60) == 1
    assert "exitcode  : 86" in said(tmp_path), "torchrun tells the workers' code"
    assert not (tmp_path / "save" / ".running").exists(), "the next start would have to look at it"
    errors = [line for line in said(tmp_path).splitlines() if "error: rank" in line]
    assert len(errors) == 1 and said(tmp_path).count("stacks of rank 1") == 1
    assert "error: rank 1 hangs in step 3, forward, block 1 of 2; no progress" in errors[0]


@pytest.mark.processes
def test_reading_that_hangs_is_reported_once_and_so_is_its_end(tmp_path: Path) -> None:
    """Even if a rank with longer steps only notices after it has been reported."""
    flags, env = ("--num_steps=4",), {"OTHERS": "--hang_seconds=6"}  # the run ends right afterwards
    with hanging(tmp_path, 2, "11", "data", 4, 0, *flags, **env) as process:
        assert process.wait(90) == 0
    text = said(tmp_path)
    assert "hang: rank 0 hangs in step 4, data; no progress for" in text
    assert len(re.findall(r"^hang: ", text, re.MULTILINE)) == 2
    assert re.search(
        r"^hang: it has ended \d+ s after it was reported; the run goes on", text, re.M
    )


@pytest.mark.processes
@pytest.mark.parametrize("store", ["torchrun's", "rank 0's"])
def test_a_stopped_process_is_named(tmp_path: Path, store: str) -> None:
    """In torch 2.2, rank 0 holds the store through which the ranks talk, so they are then alone."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if store == "rank 0's" else "0"}
    with hanging(tmp_path, 2, "0", "data", 1, 0, "--num_steps=100000", **env) as process:
        assert wait_for(lambda: "step 4/" in said(tmp_path), process), said(tmp_path)
        pid = rank_processes(process)[0]
        os.kill(pid, signal.SIGSTOP)
        text = wait_for_report(tmp_path, process)
    assert "hang: rank 0 hangs, without an answer; no progress for" in text
    assert f"rank 0: its process {pid} on" in text and "is stopped by a signal" in text
    assert "training/trainer/trainer.py" in text.split("stacks of rank 1:")[1]


@pytest.mark.processes
def test_a_process_that_keeps_the_lock_shows_its_stack(tmp_path: Path) -> None:
    with hanging(tmp_path, 2, "lock", "forward", 8, 1, "--num_steps=50") as process:
        text = wait_for_report(tmp_path, process)
    assert "hang: rank 1 hangs, without an answer; no progress for" in text
    assert "is computing" in text
    stuck = text.split("stacks of rank 1:")[1].split("stacks of rank 0:")[0]
    assert "program.py" in stuck and "in sit" in stuck and "trainer.py" in stuck


@pytest.mark.processes
def test_a_slow_run_is_left_alone(tmp_path: Path) -> None:
    """Every block takes time, and a step longer than hang_seconds."""
    flags = ("--num_steps=3", "--gradient_accumulation=4")
    with hanging(tmp_path, 0, "slow", "forward", 9, 0, *flags) as process:
        assert process.wait(90) == 0, said(tmp_path)
    assert "hang" not in said(tmp_path)
    assert not (tmp_path / "save" / "hang.txt").exists()


@pytest.mark.processes
def test_a_logger_that_takes_long_to_close_is_waited_for(tmp_path: Path) -> None:
    """For example, it sends the rest to a server."""
    flags = ("--num_steps=4", "--hang_seconds=2", "--hang_abort_seconds=6")
    with hanging(tmp_path, 2, "15", "close", 1, 0, *flags) as process:
        assert process.wait(90) == 0, said(tmp_path)
    assert "done: 4 steps" in said(tmp_path) and "hang: " not in said(tmp_path)


@pytest.mark.processes
def test_a_trace_that_takes_long_to_write_is_waited_for(tmp_path: Path) -> None:
    flags = ("--num_steps=8", "--hang_seconds=2", "--hang_abort_seconds=4", "--use_profiler=True")
    with hanging(tmp_path, 0, "10", "trace", 1, 0, *flags) as process:
        assert process.wait(90) == 0, said(tmp_path)
    assert "done: 8 steps" in said(tmp_path) and "hang: " not in said(tmp_path)


def test_what_is_waited_for() -> None:
    limits = Limits(alarm=30, end=600)
    assert limits.now(1.0, "forward") == Limits(30, 600)
    assert limits.now(None, "forward") == Limits(300, 6000), "the first step compiles"
    assert limits.now(1.0, "save") == Limits(300, 6000)
    assert limits.now(60.0, "forward") == Limits(180, 600)
    assert limits.now(600.0, "forward") == Limits(1800, 3600)
    assert Limits(alarm=0, end=600).now(60.0, "forward") == Limits(0, 600)


def test_many_ranks_make_a_short_report() -> None:
    answers = {rank: Answer(7, 3, "backward", 31.0, "  same") for rank in range(1024) if rank != 3}
    answers[5] = Answer(7, 2, "forward", 32.0, "  other")
    text = format_hang(answers, {3: Silence("its process 9 on b has ended", "")})
    assert text.splitlines() == [
        "hang: rank 3 hangs, without an answer; no progress for 32 s",
        "  rank 3: its process 9 on b has ended",
        "  rank 5: in step 7, forward, for 32 s",
        "  ranks 0-2, 4, 6-1023: in step 7, backward, for 31 s",
        "stacks of rank 3:",
        "  none: it does not answer",
        "stacks of rank 5:",
        "  other",
        "stacks of ranks 0-2, 4, 6-1023:",
        "  same",
    ]


def test_nobody_is_blamed_where_nobody_is_behind() -> None:
    answers = {rank: Answer(7, 3, "report", 31.0, "") for rank in range(4)}
    assert "all ranks wait in step 7, report, none is behind" in format_hang(answers, {})
    assert format_hang({0: answers[0]}, {}).startswith("hang: the run hangs in step 7, report; no")
