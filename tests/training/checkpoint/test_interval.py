"""checkpoint_minutes=auto: the number of nodes and the cost of a save determine the interval."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.training.support.runs import TINY, run, steps, train, write_text
from training.checkpoint.interval import LONGEST, NODE_MTBF, SHORTEST, best_interval, described
from training.config.setting import optional_number


@pytest.mark.parametrize(
    ("nodes", "stall", "writing", "seconds"),
    [
        (8, 0.66, 27, 32.2 * 60),
        (64, 0.66, 10, 11.4 * 60),
        (512, 0.66, 9, 4 * 60),
        (4096, 0.66, 12, 85),
    ],
)
def test_it_is_that_of_the_docs(nodes: int, stall: float, writing: float, seconds: float) -> None:
    """Check the table of docs/background/scale/checkpoints.md, for saves in the background."""
    assert best_interval(stall, writing, nodes) == pytest.approx(seconds, rel=0.02)
    first_order = math.sqrt(2 * stall * NODE_MTBF / nodes)
    assert best_interval(stall, writing, nodes) == pytest.approx(first_order, rel=0.01)


def test_it_has_bounds() -> None:
    assert best_interval(30, 0, 1) == LONGEST
    assert best_interval(0, 0, 4096) == SHORTEST
    assert best_interval(0.1, 500, 4096) == 500, "the save before is still being written"
    assert best_interval(1, 5000, 1) == 5000
    assert best_interval(1e9, 0, 4096) == LONGEST


def test_what_it_says() -> None:
    assert described(85.2, 0.66, 4096) == (
        "checkpoint_minutes=auto: a checkpoint every 1.4 minutes from now on, as one stops "
        "training for 0.66 s and 4096 nodes may be expected to fail once in 1.5 hours"
    )
    assert described(3600, 2, 1).endswith("and 1 node may be expected to fail once in 264 days")


def test_a_number_or_auto() -> None:
    assert optional_number("auto") is None and optional_number("2.5") == 2.5
    with pytest.raises(ValueError, match="a number or auto"):
        optional_number("often")


@pytest.mark.processes
def test_a_run_chooses_and_says_so_once(tmp_path: Path) -> None:
    """It does so after the first save; training is the same."""
    data = write_text(tmp_path)
    plain, hasty = tmp_path / "plain", tmp_path / "hasty"
    train(plain, data, 0, 2, 6)
    flags = (f"--save_ckpt_path={hasty}", f"--dataset_path={data}", "--batch_size=2")
    # A save in the background would delay the next one.
    often = ("--num_steps=6", "--checkpoint_minutes=auto", "--async_checkpoint=False")
    done = run(0, *TINY, *flags, *often, program=("-m", "tests.training.support.hasty_saves"))
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("checkpoint_minutes=auto: a checkpoint every") == 1
    saved = [path.name for path in (hasty / "checkpoints").iterdir()]
    assert {f"step_{step}_ckp" for step in range(1, 7)} == set(saved)
    assert steps(hasty) == steps(plain)


@pytest.mark.processes
def test_a_run_that_has_measured_no_save_saves_after_ten_minutes(tmp_path: Path) -> None:
    """So a short run saves only at its end, and its settings keep what was asked for."""
    data = write_text(tmp_path)
    train(tmp_path / "run", data, 0, 2, 3, "--checkpoint_minutes=auto")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_3_ckp"]
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert resolved["config"]["run"]["checkpoint_minutes"] is None
