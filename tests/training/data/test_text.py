"""`text:GLOB`: every window once per epoch, one order for any number of ranks, exact resumption."""

from pathlib import Path

import pytest
import torch

from training.data.sampler import Reader, shuffled
from training.data.sources import Text
from training.errors import RequestError, TrainingError


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(bytes(range(100, 170)))
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "empty.txt").write_bytes(b"")
    return f"{tmp_path}/**/*.txt"


def open_text(
    pattern: str,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 1,
    seq_length: int = 8,
    seed: int = 0,
) -> Reader:
    samples = Text(pattern, seq_length)
    return Reader(samples, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)


def rows(data: Reader, batches: int) -> list[list[int]]:
    return [row for _ in range(batches) for row in data.next_batch().inputs.tolist()]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 1000])
def test_shuffled_is_one_to_one(count: int) -> None:
    places = [shuffled(place, count, "key") for place in range(count)]
    assert sorted(places) == list(range(count))
    if count > 50:
        assert places != list(range(count))
        assert places != [shuffled(place, count, "other") for place in range(count)]


def test_an_epoch_reads_every_window_once_across_files(pattern: str) -> None:
    data = open_text(pattern)
    assert len(data.samples) == 169 // 8 == 21
    first, second = rows(data, 21), rows(data, 21)
    every = [list(range(start, start + 8)) for start in range(0, 168, 8)]
    assert sorted(first) == sorted(second) == every
    assert first != second, "each epoch has an order of its own"
    assert first != rows(open_text(pattern, seed=1), 21)
    assert first == rows(open_text(pattern), 21)


def test_targets_are_the_bytes_that_follow(pattern: str) -> None:
    batch = open_text(pattern, batch_size=3).next_batch()
    assert batch.inputs.shape == batch.targets.shape == (3, 8)
    assert batch.inputs.dtype == torch.int64
    assert (batch.targets == batch.inputs + 1).all()


def test_in_order_every_sample_comes_in_its_turn_and_some_may_be_skipped(pattern: str) -> None:
    samples = Text(pattern, 8)
    parts = [
        Reader(samples, batch_size=1, seed=0, rank=rank, world_size=2, shuffle=False, skip=19)
        for rank in range(2)
    ]
    firsts = [row[0] for _ in range(2) for part in parts for row in rows(part, 1)]
    assert firsts == [19 * 8, 20 * 8, 0, 8]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_number_of_ranks_changes_nothing_but_who_reads(pattern: str, world_size: int) -> None:
    alone = open_text(pattern, batch_size=4)
    together = [open_text(pattern, rank, world_size, 4 // world_size) for rank in range(world_size)]
    for _ in range(12):
        expected = rows(alone, 1)
        assert [row for data in together for row in rows(data, 1)] == expected


def test_resuming_goes_on_exactly_also_on_other_ranks(pattern: str) -> None:
    data = open_text(pattern, batch_size=4)
    rows(data, 7)  # into the second epoch
    state = data.state()
    assert state["epoch"] == 1 and state["position"] == 28 - 21
    again = [open_text(pattern, rank, 2, 2) for rank in range(2)]
    assert [part.resume(state) for part in again] == [None, None]
    assert [row for part in again for row in rows(part, 1)] == rows(data, 1)


def test_other_data_is_not_resumed(pattern: str, tmp_path: Path) -> None:
    state = open_text(pattern).state()
    assert "read from its beginning" in str(open_text(pattern, seq_length=9).resume(state))
    (tmp_path / "c.txt").write_bytes(b"more")
    assert "read from its beginning" in str(open_text(pattern).resume(state))


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"{tmp_path} is a folder; fix: .*{tmp_path}/\*\*/\*"):
        Text(str(tmp_path), 4)
    with pytest.raises(RequestError, match=f"no file matches {tmp_path}/none"):
        open_text(f"{tmp_path}/none/*")
    with pytest.raises(RequestError, match="must be followed by"):
        open_text("")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(RequestError, match="are empty"):
        open_text(f"{tmp_path}/empty")
    (tmp_path / "short").write_bytes(b"x" * 32)
    with pytest.raises(
        RequestError, match=r"has 32 bytes in 1 files, which make 3 samples of .*; one step needs 4"
    ):
        open_text(f"{tmp_path}/short", batch_size=4)


def test_a_file_that_shrinks_is_reported(pattern: str, tmp_path: Path) -> None:
    data = open_text(pattern)
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"a\.txt: became shorter"):
        rows(data, 21)
