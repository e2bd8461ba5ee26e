"""A job that has lost a node: fewer ranks read the same steps, and surplus rows are empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.data.test_stream import config, state_of, write
from tests.training.support.runs import write_text
from training.config.config import Config, DataConfig
from training.config.global_batch import share_out
from training.data.base import DataFeed
from training.data.sources import open_feed

READERS = 3
STEPS = 4


@pytest.fixture(params=["text", "stream", "epochs"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Three ranks, each with two sequences in two batches: twelve per step."""
    more: dict[str, Any] = {}
    if request.param == "stream":
        path, more = write(tmp_path, 5), {"tokenizer": "bytes"}
    else:
        path = write_text(tmp_path / "text", 1600)
    data = DataConfig(
        dataset_path=path,
        seq_length=16,
        batch_size=2,
        gradient_accumulation=2,
        epochs=1 if request.param == "epochs" else 0,
        **more,
    )
    return config(data)


def feeds(asked: Config, readers: int) -> list[DataFeed]:
    shared = share_out(asked, READERS, readers)
    return [open_feed(shared, rank, readers) for rank in range(readers)]


def step(ranks: list[DataFeed]) -> list[list[int]]:
    """Read a step; returns the sequences that count, sorted."""
    found: list[list[int]] = []
    for _ in range(ranks[0].accumulation):
        for one in ranks:
            found += one.next_rows(range(one.batch_size)).rows.targets.tolist()
    return sorted(targets for targets in found if any(target >= 0 for target in targets))


@pytest.mark.parametrize("readers", [2, 1, 5, 7, 13])
def test_steps_are_the_same(asked: Config, readers: int) -> None:
    """After a checkpoint of all ranks, and back again on the original number of ranks."""
    before, now = feeds(asked, READERS), feeds(asked, readers)
    step(before)
    for one in now:
        assert one.resume(state_of(before)) is None
        assert one.step_sequences == before[0].step_sequences == 12
    for _ in range(STEPS):
        wanted = step(before)
        assert wanted and step(now) == wanted
        assert {one.position for one in now} == {before[0].position}
    again = feeds(asked, READERS)
    for one in again:
        assert one.resume(state_of(now)) is None
    assert step(again) == step(before)


def test_the_data_end_after_the_same_step(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", 1600)
    data = DataConfig(dataset_path=path, seq_length=16, batch_size=4, epochs=1)
    ended = []
    for readers in (READERS, 2, 5):
        ranks = feeds(config(data), readers)
        steps = 0
        while not any(one.next_rows(range(one.batch_size)).spent for one in ranks):
            for _ in range(ranks[0].accumulation - 1):
                for one in ranks:
                    one.next_rows(range(one.batch_size))
            steps += 1
        ended.append(steps)
    assert ended == [1600 // 16 // 12] * 3
