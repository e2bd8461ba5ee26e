"""Packed files: windows, boundaries, which tokens count and how much, and what is refused."""

from __future__ import annotations

import math
import re
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import files, packed
from training.data.base import Sample
from training.data.packed import LAYOUTS, Layout, Packed, PackedWriter
from training.data.sampler import Reader
from training.data.sources import Synthetic
from training.errors import RequestError, TrainingError

NARROW, WIDE = LAYOUTS["16/14"], LAYOUTS["17/13"]
Token = tuple[int, int, int]
"""A token: its id, its position, its loss bit."""


def save(path: Path, tokens: list[Token], layout: Layout = NARROW) -> str:
    words = [one | position << layout.token_bits | bit << 30 for one, position, bit in tokens]
    np.array(words, "<i4").tofile(path)
    return str(path)


def row(length: int, first: int = 0) -> list[Token]:
    """Make one document, every token of which counts."""
    return [(first + i, i, 1) for i in range(length)]


def by_definition(window: list[Token]) -> tuple[list[int], list[int], list[float]]:
    """Return inputs, targets and weights of a window by definition, token by token."""
    inputs, targets, weights = [], [], []
    start = window[0][1]
    for (token, before, _), (target, position, bit) in pairwise(window):
        begins = position < before or position == 0
        if begins:
            start = position
        counts = bit and not begins
        inputs.append(token)
        targets.append(target if counts else -100)
        weights.append(math.tanh((position - start) / 10) if counts else 0.0)
    return inputs, targets, weights


def documents(layout: Layout) -> st.SearchStrategy[list[list[Token]]]:
    """Draw documents, the first of which may lack its beginning, as in a window."""
    ids = st.one_of(st.integers(0, 9), st.just(layout.vocabulary - 1))
    token = st.tuples(ids, st.integers(0, 1))
    document = st.lists(token, min_size=1, max_size=9)
    first = st.sampled_from([0, 3, layout.positions - 9])
    return st.tuples(first, st.lists(document, min_size=1, max_size=8)).map(
        lambda drawn: [
            [(one, i + (drawn[0] if number == 0 else 0), bit) for i, (one, bit) in enumerate(doc)]
            for number, doc in enumerate(drawn[1])
        ]
    )


@pytest.mark.parametrize("layout", [NARROW, WIDE], ids=["16/14", "17/13"])
@pytest.mark.parametrize("weighted", [False, True])
@given(data=st.data(), length=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_samples_are_those_of_the_definition(
    layout: Layout, weighted: bool, data: st.DataObject, length: int
) -> None:
    tokens = [token for document in data.draw(documents(layout)) for token in document]
    tokens.append((1, 0, 1))  # one loss bit somewhere
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "a.npy", tokens, layout)
        samples = Packed(path, length, layout=layout, position_weighting=weighted)
        assert len(samples) == len(tokens) // (length + 1)
        for index in range(len(samples)):
            window = tokens[index * (length + 1) : (index + 1) * (length + 1)]
            inputs, targets, weights = by_definition(window)
            sample = samples[index]
            assert sample.inputs.tolist() == inputs
            assert sample.targets.tolist() == targets
            assert sample.inputs.dtype == sample.targets.dtype == torch.int64
            if weighted:
                assert sample.weights is not None and sample.weights.dtype == torch.float32
                assert torch.allclose(sample.weights, torch.tensor(weights), atol=1e-6)
            else:
                assert sample.weights is None


def test_a_small_window_worked_by_hand(tmp_path: Path) -> None:
    """A continued document, one whose second token does not count, and one with a single token."""
    tokens = [(5, 7, 1), (6, 8, 1), (7, 0, 1), (8, 1, 0), (9, 2, 1), (3, 0, 1), (4, 0, 1)]
    path = save(tmp_path / "a.npy", tokens)
    sample = Packed(path, 6, position_weighting=True)[0]
    assert sample.inputs.tolist() == [5, 6, 7, 8, 9, 3]
    assert sample.targets.tolist() == [6, -100, -100, 9, -100, -100]
    assert sample.weights is not None
    expected = [math.tanh(0.1), 0, 0, math.tanh(0.2), 0, 0]
    assert sample.weights.tolist() == pytest.approx(expected, abs=1e-7)


def test_windows_do_not_cross_files_which_come_sorted(tmp_path: Path) -> None:
    save(tmp_path / "b.npy", row(11, 100))
    save(tmp_path / "a.npy", row(7))
    save(tmp_path / "c.npy", row(3, 200))  # shorter than a window
    (tmp_path / "a.npy.size").write_text("7\n")
    samples = Packed(f"{tmp_path}/*", 4)
    firsts = [samples[index].inputs.tolist() for index in range(len(samples))]
    assert firsts == [[0, 1, 2, 3], [100, 101, 102, 103], [105, 106, 107, 108]]
    assert samples.described() == "21 tokens in 3 files"
    with pytest.raises(IndexError):
        samples[3]
    several = Packed([f"{tmp_path}/b.npy", f"{tmp_path}/[ac].npy", f"{tmp_path}/a.npy"], 4)
    assert several.fingerprint == samples.fingerprint
    assert several.fingerprint != Packed(f"{tmp_path}/*", 5).fingerprint
    assert several.fingerprint != Packed(f"{tmp_path}/*", 4, layout=WIDE).fingerprint


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    assert len(Packed(save(tmp_path / "[1].npy", row(5)), 4)) == 1


def test_a_reader_reads_it_in_order_with_weights(tmp_path: Path) -> None:
    samples = Packed(save(tmp_path / "a.npy", row(50)), 4, position_weighting=True)
    data = Reader(samples, batch_size=2, seed=0, rank=0, world_size=1, shuffle=False, skip=1)
    batch = data.next_batch()
    assert batch.inputs[:, 0].tolist() == [5, 10]
    assert batch.weights is not None and batch.weights.shape == (2, 4)


def test_more_files_than_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "OPEN", 2)
    for number in range(5):
        save(tmp_path / f"{number}.npy", row(5, 10 * number))
    samples = Packed(f"{tmp_path}/*.npy", 4)
    assert [samples[i % 5].inputs[0].item() for i in range(10)] == [0, 10, 20, 30, 40] * 2
    assert len(samples._maps._maps) == 2


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no file matches .*none\.npy"):
        Packed(f"{tmp_path}/none.npy", 4)
    with pytest.raises(RequestError, match="no packed files are given"):
        Packed([], 4)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(RequestError, match="empty: is empty"):
        Packed(f"{tmp_path}/empty", 4)
    (tmp_path / "odd").write_bytes(b"x" * 42)
    with pytest.raises(RequestError, match="odd: has 42 bytes, which is not a multiple of 4"):
        Packed(f"{tmp_path}/odd", 4)
    path = save(tmp_path / "a", row(10))
    for shown in ("11", "", "many"):
        (tmp_path / "a.size").write_text(shown)
        with pytest.raises(RequestError, match=f"has 10 tokens, but .*a.size says '{shown}'"):
            Packed(path, 4)


def test_data_without_any_loss_bit_is_refused(tmp_path: Path) -> None:
    np.arange(100, dtype="<i4").tofile(tmp_path / "plain")  # unwrapped ids
    with pytest.raises(RequestError, match="no loss bit"):
        Packed(f"{tmp_path}/plain", 4)


def test_ids_beyond_the_vocabulary_are_reported_by_file_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the beginning of any file they are found before training, further on while reading."""
    save(tmp_path / "0", row(30))
    tokens = row(30)
    tokens[17] = (400, 17, 1)
    path, fault = save(tmp_path / "a", tokens), r"a: token 17: the id 400 is not below .* 400"
    with pytest.raises(RequestError, match=fault):
        Packed(f"{tmp_path}/*", 4, vocab_size=400)
    monkeypatch.setattr(packed, "PROBE", 17)
    samples = Packed(path, 4, vocab_size=400)
    assert samples.vocab_size == 400
    samples[2]
    with pytest.raises(RequestError, match=fault) as shown:
        samples[3]
    assert shown.value.local and shown.value.exit_code == 2
    assert Packed(f"{tmp_path}/a", 4, vocab_size=401)[3].inputs[2] == 400
    assert Packed(f"{tmp_path}/a", 4).vocab_size == 1 << 16
    assert Packed(f"{tmp_path}/a", 4, layout=WIDE).vocab_size == 1 << 17


def test_words_with_bit_31_are_reported(tmp_path: Path) -> None:
    np.array([1 << 30, 1 << 30, -2, 3], "<i4").tofile(tmp_path / "a")
    with pytest.raises(RequestError, match=r"token 2: bit 31 is set \(word 0xfffffffe\)"):
        Packed(f"{tmp_path}/a", 3)


def test_a_file_that_shrinks_or_goes_is_reported(tmp_path: Path) -> None:
    path = Path(save(tmp_path / "a", row(30)))
    samples = Packed(str(path), 4)
    samples[5]
    path.write_bytes(path.read_bytes()[:40])
    samples[1]
    with pytest.raises(TrainingError, match="a: became shorter"):
        samples[5]
    path.unlink()
    samples = Packed(save(path, row(30)), 4)
    samples._maps = files.Maps()
    path.unlink()
    with pytest.raises(TrainingError, match="a: cannot be read: No such file"):
        samples[0]


@pytest.mark.parametrize("layout", [NARROW, WIDE], ids=["16/14", "17/13"])
def test_what_is_written_is_read(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "out.npy"
    with PackedWriter(path, layout=layout) as out:
        out.write([5, layout.vocabulary - 1, 7], [True, False, True])
        out.write([])
        out.write(torch.arange(layout.positions))
        out.write(np.array([1, 2], np.uint16))
        assert not path.exists()
    count = 3 + layout.positions + 2
    assert (out.documents, out.tokens) == (4, count)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.npy", "out.npy.size"]
    assert (tmp_path / "out.npy.size").read_text() == f"{count}\n"
    sample = Packed(str(path), count - 1, layout=layout)[0]
    expected = [5, layout.vocabulary - 1, 7, *range(layout.positions), 1, 2]
    assert sample.inputs.tolist() == expected[:-1]
    targets = [-100, 7, -100, *range(1, layout.positions), -100, 2]
    assert sample.targets.tolist() == targets


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    def refused(tokens: object, match: str, layout: Layout = NARROW) -> None:
        with (
            pytest.raises(RequestError, match=match),
            PackedWriter(tmp_path / "a", layout=layout) as out,
        ):
            out.write([1, 2])
            out.write(tokens)  # type: ignore[arg-type]

    refused([1, 65_536], r"a: document 1 has the id 65,536, and 16 bits hold ids from 0 to 65,535")
    refused([1, 131_072], "document 1 has the id 131,072, and 17 bits", WIDE)
    refused([-3], "document 1 has the id -3")
    refused(
        range(16_385), "document 1 has 16,385 tokens, and 14 bits .* below 16,384; fix: split it"
    )
    refused(range(8_193), "document 1 has 8,193 tokens, and 13 bits", WIDE)
    refused([1.5], "document 1 is not a list of integers")
    refused([[1, 2]], "document 1 is not a list of integers")
    with (
        pytest.raises(RequestError, match="document 0 has 3 tokens, but 1 marks"),
        PackedWriter(tmp_path / "a") as out,
    ):
        out.write([1, 2, 3], [True])
    with pytest.raises(RequestError, match="no token was written"), PackedWriter(tmp_path / "a"):
        pass
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(TrainingError, match="cannot be written: No such file"),
        PackedWriter(tmp_path / "none" / "a"),
    ):
        pass


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with PackedWriter(path) as out:
        out.write(range(10))
    with pytest.raises(KeyboardInterrupt), PackedWriter(path) as out:
        out.write(range(20))
        raise KeyboardInterrupt
    assert Packed(str(path), 4).described() == "10 tokens in 1 files"
    with PackedWriter(path) as out:
        out.write(range(20))
    assert Packed(str(path), 4).described() == "20 tokens in 1 files"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_size_of_an_older_file_never_stands_beside_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with PackedWriter(path) as out:
        out.write(range(10))
    publish = packed.publish

    def broken(written: Path, place: Path) -> None:
        if place != path:
            raise OSError(28, "No space left on device")
        publish(written, place)

    monkeypatch.setattr(packed, "publish", broken)
    with pytest.raises(TrainingError, match="No space left"), PackedWriter(path) as out:
        out.write(range(20))
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    assert Packed(str(path), 4).described() == "20 tokens in 1 files"


def test_messages_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as shown:
        Packed(f"{tmp_path}/none", 4)
    assert not re.search("\n", str(shown.value))


def test_synthetic_tokens_are_a_function_of_seed_and_number() -> None:
    def same(one: Sample, other: Sample) -> bool:
        return torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)

    samples = Synthetic(64, 50, seed=3)
    assert len(samples) == 100_000 and samples.vocab_size == 50
    state = torch.random.get_rng_state()
    first, last = samples[0], samples[99_999]
    assert torch.equal(torch.random.get_rng_state(), state), "no other randomness is touched"
    assert first.inputs.shape == (64,) and first.inputs.dtype == torch.int64
    assert torch.equal(first.inputs[1:], first.targets[:-1])
    again = Synthetic(64, 50, seed=3)
    assert same(again[99_999], last) and same(again[0], first) and not same(first, last)
    other = Synthetic(64, 50, seed=4)
    assert not same(other[0], first) and other.fingerprint != samples.fingerprint
    seen = torch.cat([samples[index].inputs for index in range(100)])
    assert seen.min() == 0 and seen.max() == 49
    assert seen.bincount().min() > 64  # 128 each on average
    with pytest.raises(IndexError):
        samples[100_000]
    with pytest.raises(RequestError, match="count is 0, but must be at least 1"):
        Synthetic(64, 50, count=0)
