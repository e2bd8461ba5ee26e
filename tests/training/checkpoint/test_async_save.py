"""Training continues while a checkpoint is written, and the checkpoint is that of its moment."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import (
    TINY,
    losses,
    rank_processes,
    run,
    started,
    steps,
    train,
    wait_for,
    write_text,
)
from training import manifest

pytestmark = pytest.mark.processes

PROGRAM = """
import os, sys, time
from training import mamba_fsdp, manifest
from training.checkpoint import dcp
from training.parallel import fsdp
from training.entrypoint import enter, leave
{change}
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""

SLOW_DISK = """
save = dcp.dcp.save
def slow(*given, **named):
    time.sleep(1 + int(os.environ["RANK"]))
    return save(*given, **named)
dcp.dcp.save = slow
"""

BROKEN_DISK_OF_RANK_1 = """
def broken(path):
    raise OSError(5, "Input/output error")
if os.environ["RANK"] == "1":
    manifest.File.of = broken
"""

NO_NUMBER_IN_STEP_8 = """
clip, seen = fsdp.clip_gradients, []
def no_number(model, threshold):
    seen.append(1)
    return clip(model, threshold) * (float("nan") if len(seen) == 8 else 1)
fsdp.clip_gradients = no_number
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A run that waits while its checkpoints are written."""
    save = tmp_path_factory.mktemp("waiting")
    train(save, data, 2, 2, 20, "--checkpoint_interval=5", "--async_checkpoint=False")
    return save


def flags(save: Path, data: str, *more: str) -> tuple[str, ...]:
    asked = ("--batch_size=2", "--num_steps=20", "--checkpoint_interval=5", "--report_interval=1")
    return (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", *asked, *more)


def changed(folder: Path, change: str) -> tuple[str]:
    """Write a program that is the entry point with one change."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(change=change))
    return (str(program),)


def saved(save: Path) -> list[str]:
    return sorted(path.name for path in (save / "checkpoints").iterdir())


@pytest.mark.fsdp2
def test_a_checkpoint_is_that_of_its_moment_though_training_went_on(
    tmp_path: Path, data: str, waiting: Path
) -> None:
    """It equals, byte for byte, one that training waits for; the disk is slow, mostly on rank 1."""
    done = run(2, *flags(tmp_path, data), program=changed(tmp_path, SLOW_DISK))
    assert done.returncode == 0, done.stderr
    first = done.stdout.index(f"saved {tmp_path}/checkpoints/step_5_ckp")
    assert done.stdout.index("step 7/20") < first, "training waited"
    assert done.stdout.index("step 11/20") > first, "a save does not wait for the one before"
    assert steps(tmp_path) == steps(waiting)
    assert saved(tmp_path) == saved(waiting)
    for name in saved(waiting):
        files = [
            {
                path.name: path.read_bytes()
                for path in (save / "checkpoints" / name).glob("*.distcp")
            }
            for save in (tmp_path, waiting)
        ]
        assert len(files[0]) == 2 and files[0] == files[1]


def test_sigterm_during_a_save_ends_when_that_and_the_last_are_on_disk(
    tmp_path: Path, data: str
) -> None:
    asked = flags(tmp_path, data, "--num_steps=100000", "--checkpoint_interval=100")
    folder = tmp_path / "checkpoints"
    with started(2, *asked, program=changed(tmp_path, SLOW_DISK)) as process:
        assert wait_for((folder / "step_100_ckp.tmp").exists, process)
        os.kill(rank_processes(process)[1], signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert "exitcode  : 85" in err
    assert len(saved(tmp_path)) == 2 and saved(tmp_path)[0] == "step_100_ckp"
    for name in saved(tmp_path):
        shown, fault = manifest.read(folder / name)
        assert shown is not None and not manifest.rotten(folder / name, shown), fault
        assert out.index(f"saved {folder}/{name} ") < out.index("start again to go on")


def test_a_disk_that_fails_one_rank_in_the_background_ends_the_run(
    tmp_path: Path, data: str
) -> None:
    program = changed(tmp_path, BROKEN_DISK_OF_RANK_1)
    done = run(2, *flags(tmp_path, data, "--num_steps=100000"), program=program)
    shown = f"rank 1: checkpoint {tmp_path}/checkpoints/step_5_ckp.tmp could not be written"
    assert shown in done.stderr and "Input/output error" in done.stderr
    assert "exitcode  : 1" in done.stderr
    assert saved(tmp_path) == []


def test_an_error_elsewhere_still_completes_what_was_sound(tmp_path: Path, data: str) -> None:
    program = changed(tmp_path, SLOW_DISK + NO_NUMBER_IN_STEP_8)
    done = run(2, *flags(tmp_path, data), program=program)
    assert "step 8: grad_norm is nan" in done.stderr
    assert "exitcode  : 1" in done.stderr
    assert saved(tmp_path) == ["step_5_ckp"]
    assert run(2, *flags(tmp_path, data)).returncode == 0
    assert len(losses(tmp_path)) == 20


@pytest.mark.parametrize(
    ("more", "shown"), [("--fsdp_engine=fsdp1", 1), ("--async_checkpoint=False", 0)]
)
def test_where_training_must_wait_it_is_reported_once(
    tmp_path: Path, data: str, more: Any, shown: int
) -> None:
    done = run(2, *flags(tmp_path, data, more))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checkpoints are written while training waits") == shown
    assert len(saved(tmp_path)) == 4
