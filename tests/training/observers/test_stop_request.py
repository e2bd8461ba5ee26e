"""A request to stop before the first step is over ends a run at once: there is nothing to save."""

import signal
from pathlib import Path

import pytest

from tests.training.support.runs import TINY, run, started, wait_for, write_text
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
