"""`epochs`, `n_samples_to_skip`, `position_weighting`: what they do, and where they are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.data.test_stream import config, write
from tests.training.support.runs import TINY, losses, run, steps, write_text
from training.config.config import DataConfig
from training.data.packed import PackedWriter
from training.data.sources import open_feed
from training.errors import RequestError


def flags(save: Path, path: str, *more: str) -> tuple[str, ...]:
    return (*TINY, f"--dataset_path={path}", f"--save_ckpt_path={save}", "--batch_size=2", *more)


@pytest.mark.processes
def test_a_run_ends_with_its_last_epoch_and_stays_ended(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", 18 * 17)  # 17 sequences, in steps of 4
    asked = flags(tmp_path, path, "--epochs=2", "--num_steps=50", "--gradient_accumulation=2")
    done = run(0, *asked)
    assert done.returncode == 0, done.stderr
    assert "epochs: 2 passes over the data are done" in done.stdout
    assert "done: 8 steps" in done.stdout
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, 9))
    manifest = tmp_path / "checkpoints" / "step_8_ckp" / "manifest.json"
    assert json.loads(manifest.read_text())["data"]["position"] == 8 * 4 - 17
    assert '"kind": "report"' in (tmp_path / "metrics.jsonl").read_text()
    again = run(0, *asked)
    assert again.returncode == 0 and "done: 8 steps" in again.stdout, again.stderr


@pytest.mark.processes
def test_an_epoch_of_a_stream_ends_when_all_lanes_of_all_ranks_have(tmp_path: Path) -> None:
    path = write(tmp_path / "texts", 3)
    done = run(2, *flags(tmp_path, path, "--tokenizer=bytes", "--epochs=1", "--num_steps=500"))
    assert done.returncode == 0, done.stderr
    assert "epochs: 1 passes over the data are done" in done.stdout
    assert 10 < len(losses(tmp_path)) < 100


def test_a_new_run_leaves_out_samples_of_the_order(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text")
    data = DataConfig(dataset_path=path, seq_length=17, batch_size=2)
    whole = open_feed(config(data), 0, 1)
    for _ in range(3):
        whole.next_rows(range(2))
    later = DataConfig(dataset_path=path, seq_length=17, batch_size=2, n_samples_to_skip=6)
    skipped = open_feed(config(later), 0, 1)
    expected, found = (one.next_rows(range(2)).rows.inputs for one in (whole, skipped))
    assert found.tolist() == expected.tolist()
    assert skipped.resume(whole.state(lambda mine: [mine])) is None
    assert skipped.position == 8, "a resumed run goes by its checkpoint"


def test_fewer_samples_than_one_step_are_refused(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", 18 * 17)
    few = DataConfig(dataset_path=path, seq_length=17, batch_size=2, epochs=1, n_samples_to_skip=16)
    with pytest.raises(
        RequestError, match=r"epochs: 1 pass over 17 samples is less than .* 16 that are"
    ):
        open_feed(config(few), 0, 1)


def test_position_weighting_reaches_packed_data_alone_and_in_a_mixture(tmp_path: Path) -> None:
    file = tmp_path / "packed.npy"
    with PackedWriter(file) as packed:
        packed.write(list(range(100)))
    text = write_text(tmp_path / "text")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(f"- {{path: 'packed:{file}', weight: 1}}\n- {{path: '{text}', weight: 1}}\n")
    outer = tmp_path / "outer.yaml"
    outer.write_text(f"- {{path: 'mixture:{mixture}', weight: 1}}\n")
    for path in (f"packed:{file}", f"mixture:{mixture}", f"mixture:{outer}"):
        data = DataConfig(dataset_path=path, seq_length=9, batch_size=4, position_weighting=True)
        weights = open_feed(config(data), 0, 1).next_rows(range(4)).rows.weights
        assert weights is not None and weights.unique().numel() > 5
    mixture.write_text(f"- {{path: '{text}', weight: 1}}\n")
    for path in (text, f"mixture:{mixture}", f"mixture:{outer}"):
        data = DataConfig(dataset_path=path, seq_length=9, position_weighting=True)
        with pytest.raises(RequestError, match="position_weighting: "):
            open_feed(config(data), 0, 1)
