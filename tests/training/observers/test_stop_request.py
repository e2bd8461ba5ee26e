"""A request to stop is not held up by a long first step, with nothing to save, or evaluation."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.json_lines import read
from tests.support.processes import descendants
from tests.training.support.runs import TINY, run, started, steps, wait_for, write_text
from training.checkpoint.lease import LEASE_FILE

pytestmark = pytest.mark.processes

HOURS = "--gradient_accumulation=10000000"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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


@pytest.mark.parametrize(("ranks", "num_steps", "code"), [(0, 4, 85), (2, 4, 85), (0, 2, 0)])
def test_a_long_evaluation_does_not_hold_up_the_checkpoint(
    tmp_path: Path, ranks: int, num_steps: int, code: int
) -> None:
    """One rank alone is asked to stop; after the last step the run is done."""
    data, held_out = write_text(tmp_path / "text"), write_text(tmp_path / "minutes", 6_000_000)
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/run")
    evaluating = (f"--eval_dataset_path={held_out}", "--eval_interval=2", "--eval_batches=0")
    asked = (*flags, *evaluating, f"--num_steps={num_steps}", "--report_interval=1")
    records = tmp_path / "run" / "metrics.jsonl"
    with started(ranks, *asked) as process:
        wait_for(lambda: records.exists() and len(read(records, "report")) == 2, process)
        os.kill(max(descendants(process.pid)) if ranks else process.pid, signal.SIGTERM)
        said, error = process.communicate(timeout=120)
    assert process.returncode == code or f"exitcode  : {code}" in error, error
    assert "asked to stop: step 2 is not evaluated" in said
    assert len(steps(tmp_path / "run")) == 2 and not read(records, "evaluation")
    assert (tmp_path / "run" / "checkpoints" / "step_2_ckp").is_dir()
