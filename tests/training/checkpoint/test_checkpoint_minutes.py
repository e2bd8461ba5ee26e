"""Checkpoints by the clock: a lost node costs minutes of work, however long a step takes."""

from pathlib import Path

import pytest

from tests.training.support.runs import TINY, run, steps, train, write_text

pytestmark = pytest.mark.processes


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_is_due_after_some_minutes(tmp_path: Path) -> None:
    """It is due on all ranks at once, and the losses are those of a run without."""
    data = write_text(tmp_path)
    plain, timed = tmp_path / "plain", tmp_path / "timed"
    train(plain, data, 2, 2, 8)
    train(timed, data, 2, 2, 8, "--checkpoint_minutes=0.0001")
    assert saved(plain) == [8]
    assert len(saved(timed)) > 1 and saved(timed)[-1] == 8
    assert steps(timed) == steps(plain)


def test_the_newest_and_those_of_the_interval_are_kept(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    kept = ("--checkpoint_minutes=0.0001", "--keep_checkpoints=1", "--keep_every=4")
    train(tmp_path / "run", data, 1, 2, 10, "--checkpoint_interval=4", *kept)
    assert saved(tmp_path / "run") == [4, 8, 10]


def test_no_negative_minutes(tmp_path: Path) -> None:
    done = run(0, *TINY, f"--save_ckpt_path={tmp_path}", "--checkpoint_minutes=-1")
    assert done.returncode == 2 and "checkpoint_minutes: must not be negative" in done.stderr
