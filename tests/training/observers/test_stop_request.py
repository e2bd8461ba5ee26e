"""A request to stop is not delayed by a long first step, with nothing to save, or evaluation."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.json_lines import read
from tests.training.support.runs import (
    COLD,
    TINY,
    rank_processes,
    run,
    started,
    steps,
    wait_for,
    write_text,
)
from training.checkpoint.lease import LEASE_FILE
from training.entrypoint import exit_code
from training.observers.stop_request import SIGNALS, StopRequest

pytestmark = pytest.mark.processes

HOURS = "--gradient_accumulation=10000000"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_long_first_step_does_not_hold_up_an_end(tmp_path: Path, number: signal.Signals) -> None:
    data = write_text(tmp_path / "text")
    save = tmp_path / "run"
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--num_steps=4")
    with started(0, *flags, HOURS) as process:
        wait_for(lambda: (save / LEASE_FILE).exists(), process)
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 85, said
    assert "asked to stop before the first step was over: nothing is new" in said
    assert not (save / LEASE_FILE).exists(), "the next start need not wait for it"
    done = run(0, *flags)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("ranks", "num_steps"), [(0, 4), (2, 4), (0, 2), (2, 2)])
def test_a_long_evaluation_does_not_hold_up_the_checkpoint(
    tmp_path: Path, ranks: int, num_steps: int
) -> None:
    """Only one rank is asked to stop; the last step's evaluation is left to the next start."""
    data, held_out = write_text(tmp_path / "text"), write_text(tmp_path / "minutes", 6_000_000)
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/run")
    evaluating = (f"--eval_dataset_path={held_out}", "--eval_interval=2", "--eval_batches=0")
    asked = (*flags, *evaluating, f"--num_steps={num_steps}", "--report_interval=1")
    records = tmp_path / "run" / "metrics.jsonl"
    with started(ranks, *asked) as process:
        wait_for(lambda: records.exists() and len(read(records, "report")) == 2, process)
        os.kill(rank_processes(process)[1] if ranks else process.pid, signal.SIGTERM)
        said, error = process.communicate(timeout=120)
    assert process.returncode == 85 or "exitcode  : 85" in error, error
    assert "asked to stop: step 2 is not evaluated" in said
    assert len(steps(tmp_path / "run")) == 2 and not read(records, "evaluation")
    assert (tmp_path / "run" / "checkpoints" / "step_2_ckp").is_dir()
    if num_steps == 2:
        for _ in range(2):
            done = run(ranks, *asked, "--eval_batches=3")
            assert done.returncode == 0, done.stderr
            assert [one["step"] for one in read(records, "evaluation")] == [2]


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_first_ctrl_c_saves(tmp_path: Path, ranks: int) -> None:
    """Also through torchrun by hand, which passes it on and has its own exit code."""
    data, save = write_text(tmp_path / "text"), tmp_path / "run"
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--batch_size=2")
    with started(ranks, *flags, "--num_steps=100000", python=COLD) as process:
        wait_for(lambda: (save / "metrics.jsonl").exists() and steps(save), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert ranks or (process.returncode == 85 and "Traceback" not in err), err
    assert "KeyboardInterrupt" not in err and "Ctrl-C again ends it at once" in err
    assert "start again to go on" in out
    assert list(save.glob("checkpoints/step_*_ckp/manifest.json"))


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    data, save = write_text(tmp_path / "text"), tmp_path / "run"
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--num_steps=4")
    with started(0, *flags, HOURS, python=COLD) as process:
        wait_for((save / "config.json").exists, process)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT  # 130 for a shell
    assert "Ctrl-C again ends it at once" in said and "Traceback" not in said + err


@pytest.fixture
def usual_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_that_is_ignored_stays_so(usual_signals: None) -> None:
    """As in a script's background job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    StopRequest(lambda: None, 0).first_step_is_over()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_before_a_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise KeyboardInterrupt

    assert exit_code(work) == 130
    assert capsys.readouterr().err == "interrupted\n"
