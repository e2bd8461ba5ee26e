"""Broken checkpoints are skipped with a message; losses then match those of an undisturbed run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import TINY, losses, run, steps, train, write_text

pytestmark = pytest.mark.processes

STEPS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    save = tmp_path_factory.mktemp("undisturbed")
    train(save, data, 2, 2, STEPS, "--checkpoint_interval=10")
    return save


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[int, tuple[str, Callable[[Path], Any], str]] = {
    21: ("__1_0.distcp", flip_a_bit, "__1_0.distcp is not what was written: its checksum differs"),
    22: ("__0_0.distcp", flip_a_bit, "__0_0.distcp is not what was written: its checksum differs"),
    23: (".metadata", flip_a_bit, ".metadata is not what was written: its checksum differs"),
    24: ("__1_0.distcp", halve, "__1_0.distcp has "),
    25: ("__0_0.distcp", os.unlink, "__0_0.distcp is missing, should have "),
    26: ("manifest.json", halve, "its manifest.json cannot be read: "),
    27: ("manifest.json", os.unlink, "it has no manifest.json"),
}
"""Step of a checkpoint -> its file, the damage, and the message."""


@pytest.mark.parametrize("ranks", [2, 0])
def test_all_broken_ones_are_passed_over_to_the_newest_sound_one(
    tmp_path: Path, data: str, undisturbed: Path, ranks: int
) -> None:
    """One rank reads what two have written. Only sound checkpoints are kept afterwards."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(undisturbed / "checkpoints", folder)
    shutil.rmtree(folder / f"step_{STEPS}_ckp")
    for step, (name, damage, _) in DAMAGES.items():
        shutil.copytree(folder / "step_20_ckp", folder / f"step_{step}_ckp")
        damage(folder / f"step_{step}_ckp" / name)
    flags = (f"--save_ckpt_path={tmp_path}", f"--dataset_path={data}", f"--num_steps={STEPS}")
    batch = f"--batch_size={4 // max(1, ranks)}"
    often = ("--checkpoint_interval=4", "--keep_checkpoints=2")
    done = run(ranks, *TINY, *flags, batch, *often)
    assert done.returncode == 0, done.stderr
    for step, (_, _, fault) in DAMAGES.items():
        assert f"WARNING: checkpoint {folder}/step_{step}_ckp is broken ({fault}" in done.stdout
    assert f"resumed from {folder}/step_20_ckp at step 20" in done.stdout
    assert losses(tmp_path) == pytest.approx(losses(undisturbed)[20:], abs=0 if ranks else 1e-5)
    aside = {f"step_{step}_ckp.broken" for step in DAMAGES}
    assert {path.name for path in folder.iterdir()} == {"step_28_ckp", "step_30_ckp", *aside}


def test_where_none_is_sound_nothing_begins_anew(tmp_path: Path, data: str) -> None:
    flags = (*TINY, f"--save_ckpt_path={tmp_path}", f"--dataset_path={data}")
    assert run(0, *flags, "--num_steps=2").returncode == 0
    before = steps(tmp_path)
    flip_a_bit(tmp_path / "checkpoints" / "step_2_ckp" / "__0_0.distcp")
    done = run(0, *flags, "--num_steps=4")
    assert done.returncode == 1
    assert f"error: none of the 1 checkpoints of {tmp_path} is sound" in done.stderr
    assert "step_2_ckp is broken (__0_0.distcp is not what was written" in done.stdout
    assert steps(tmp_path) == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2_ckp"]


def test_where_none_of_its_own_is_sound_a_run_does_not_begin_from_another(
    tmp_path: Path, data: str, undisturbed: Path
) -> None:
    flags = (*TINY, f"--save_ckpt_path={tmp_path}", f"--dataset_path={data}")
    load = f"--load_ckpt_path={undisturbed}"
    assert run(0, *flags, load, f"--num_steps={STEPS + 2}").returncode == 0
    flip_a_bit(tmp_path / "checkpoints" / f"step_{STEPS + 2}_ckp" / "__0_0.distcp")
    before = steps(tmp_path)
    done = run(0, *flags, load, f"--num_steps={STEPS + 4}")
    assert done.returncode == 1
    assert f"none of the 1 checkpoints of {tmp_path} is sound; fix: move them away" in done.stderr
    assert "resumed from" not in done.stdout
    assert steps(tmp_path) == before
