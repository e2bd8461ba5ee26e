"""Mixtures: the weights hold, each source is read in order, and any sample can be found."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.base import Sample
from training.data.mixture import Mixture, Source, apportioned, listed
from training.data.sampler import Reader
from training.data.sources import open_samples
from training.errors import RequestError

LENGTH = 2


class Numbered:
    """Samples that contain their source's tag and their own number."""

    seq_length, knows_documents = LENGTH, False

    def __init__(self, tag: int, count: int, *, weighted: bool = False, length: int = 2) -> None:
        self.tag, self.count, self.weighted, self.seq_length = tag, count, weighted, length
        self.vocab_size = max(count, tag) + 1
        self.fingerprint = f"{tag} {count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self.count
        row = torch.tensor([self.tag, index])
        return Sample(row, row, torch.full((2,), 0.5) if self.weighted else None)

    def described(self) -> str:
        return f"{self.count:,} things"

    def is_here(self) -> bool:
        return True


def mixed(
    *parts: tuple[int, float] | tuple[int, float, int], seed: int = 0, slots: int = 1000
) -> Mixture:
    """Make a mixture of sources of (count, weight, order)."""
    sources = [
        Source(
            name=f"s{tag}",
            samples=Numbered(tag, part[0]),
            weight=part[1],
            order=part[2] if len(part) > 2 else 0,
        )
        for tag, part in enumerate(parts)
    ]
    return Mixture(sources, seed=seed, slots=slots)


def drawn(mixture: Mixture, count: int, first: int = 0) -> list[tuple[int, int]]:
    """Return tag and number of `count` samples."""
    rows = [mixture[index].inputs.tolist() for index in range(first, first + count)]
    return [(tag, number) for tag, number in rows]


weights = st.lists(
    st.one_of(st.integers(1, 20).map(float), st.floats(1e-6, 1e3)), min_size=1, max_size=30
)


@given(weights, st.integers(30, 1200))
@settings(max_examples=200, deadline=None)
def test_slots_sum_exactly_with_one_each_and_none_is_far_off(
    given_weights: list[float], slots: int
) -> None:
    exact = [Fraction(weight) for weight in given_weights]
    taken = apportioned(exact, slots)
    assert sum(taken) == slots and min(taken) >= 1
    quotas = [weight * slots / sum(exact) for weight in exact]
    if min(quotas) >= 1:  # if no source is raised to one slot, none is off by a whole slot
        assert all(abs(q - t) < 1 for q, t in zip(quotas, taken, strict=True))
    heavier = sorted(zip(exact, taken, strict=True))
    assert all(fewer <= more for (one, fewer), (other, more) in pairwise(heavier) if one < other)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 9).map(float), st.integers(0, 60)),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_it_is_what_reading_one_after_another_gives(
    parts: list[tuple[int, float, int]], seed: int
) -> None:
    parts = [(count, weight, order % count) for count, weight, order in parts]
    mixture = mixed(*parts, seed=seed, slots=40)
    turn = [order for _, _, order in parts]
    read: Counter[int] = Counter()
    for tag, number in drawn(mixture, len(mixture)):
        assert number == turn[tag] % parts[tag][0], "each source goes on where it was"
        turn[tag] += 1
        read[tag] += 1
    whole = [read[tag] / parts[tag][0] for tag in range(len(parts))]
    assert min(whole) == 1, "the length is one pass of the source that takes longest"
    assert list(mixture.passes(len(mixture)).values()) == pytest.approx(whole)
    ends = drawn(mixture, 1, len(mixture) - 1)[0][0]
    assert whole[ends] == 1, "and no longer"


def test_every_pattern_has_the_weights_exactly() -> None:
    mixture = mixed((10**6, 0.4108), (10**6, 0.5892))
    for first in (0, 1000, 57_000):
        assert Counter(tag for tag, _ in drawn(mixture, 1000, first)) == {0: 411, 1: 589}
    halves = [Counter(t for t, _ in drawn(mixture, 100, first))[0] for first in range(0, 1000, 100)]
    assert all(20 < half < 60 for half in halves), "they are mixed, not in blocks"


def test_it_is_the_same_for_a_seed_and_touches_no_other_randomness() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    one, same, other = (mixed((50, 1.0), (50, 2.0), seed=seed) for seed in (1, 1, 2))
    assert drawn(one, 60) == drawn(same, 60) != drawn(other, 60)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    assert one.fingerprint == same.fingerprint != other.fingerprint
    changed = [mixed((50, 1.0), (50, 3.0), seed=1), mixed((50, 1.0, 1), (50, 2.0), seed=1)]
    changed.append(mixed((50, 1.0), (51, 2.0), seed=1))
    assert len({one.fingerprint, *(two.fingerprint for two in changed)}) == 4


def test_one_source_alone_is_itself() -> None:
    mixture = mixed((1500, 3.0))
    assert len(mixture) == 1500
    assert drawn(mixture, 1500) == [(0, index) for index in range(1500)]


def test_passes_tell_who_begins_again() -> None:
    mixture = mixed((100, 0.5), (10_000, 0.5))
    assert mixture.passes(0) == {"s0": 0, "s1": 0}
    assert mixture.passes(1000) == {"s0": 5.0, "s1": 0.05}
    whole = mixture.passes(len(mixture))
    assert whole["s1"] == 1 and whole["s0"] == pytest.approx(100, rel=0.01)
    assert mixture.passes(3 * len(mixture))["s1"] == 3


def test_a_reader_goes_through_it_in_order_and_skips() -> None:
    mixture = mixed((30, 1.0), (40, 2.0))
    ranks = [
        Reader(mixture, batch_size=2, seed=9, rank=rank, world_size=2, shuffle=False, skip=5)
        for rank in range(2)
    ]
    rows = [row for reader in ranks for row in reader.next_batch().inputs.tolist()]
    assert [(tag, number) for tag, number in rows] == drawn(mixture, 4, 5)


def test_weights_that_rounding_changes_much_are_reported() -> None:
    assert mixed((5, 0.25), (5, 0.75)).notes == []
    mixture = mixed((5, 1e-9), (5, 1.0))
    assert mixture.notes == [
        "mixture: s0 is 0.1000% of the samples instead of 0.0000%: 1 of 1,000 slots"
    ]
    assert mixed((5, 0.0104), (5, 0.9896)).notes[0].startswith("mixture: s0 is 1.0000%")


def test_more_sources_than_slots_have_one_each() -> None:
    mixture = mixed(*[(1, 1.0)] * 50, slots=20)
    assert sorted(drawn(mixture, 50)) == [(tag, 0) for tag in range(50)]


def test_sources_of_weight_0_are_not_read() -> None:
    mixture = mixed((500, 0.0), (7, 1.0))
    assert mixture.vocab_size == 8 and mixture.described() == "s1: 7 things"
    assert {tag for tag, _ in drawn(mixture, len(mixture))} == {1}
    assert mixed((0, 0.0), (7, 1.0)).passes(7) == {"s1": 1}


def test_targets_weigh_1_where_only_another_source_weighs() -> None:
    sources = [
        Source(name="a", samples=Numbered(0, 9, weighted=True), weight=1),
        Source(name="b", samples=Numbered(1, 9), weight=1),
    ]
    mixture = Mixture(sources, seed=0)
    batch = Reader(mixture, batch_size=9, seed=0, rank=0, world_size=1, shuffle=False).next_batch()
    assert batch.weights is not None
    assert batch.weights[:, 0].tolist() == [0.5 if tag == 0 else 1 for tag, _ in drawn(mixture, 9)]
    assert Mixture(sources[1:], seed=0)[0].weights is None


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([(5, 0.0)], "no source has a weight above 0"),
        ([], "no source has a weight above 0"),
        ([(5, -1.0), (5, 1.0)], "s0: weight is -1.0"),
        ([(5, math.nan), (5, 1.0)], "s0: weight is nan"),
        ([(5, math.inf)], "s0: weight is inf"),
        ([(5, 1.0, 5)], "s0: order is 5, but must be from 0 to 4"),
        ([(5, 1.0, -1)], "s0: order is -1"),
        ([(0, 1.0)], "s0: has 0 things, which make no sample of seq_length 2"),
    ],
)
def test_mixtures_that_are_refused(parts: list[tuple[int, float]], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        mixed(*parts)


def test_sources_that_do_not_fit_together_are_refused() -> None:
    sources = [
        Source(name="a", samples=Numbered(0, 9), weight=1),
        Source(name="a", samples=Numbered(1, 9, length=3), weight=1),
    ]
    with pytest.raises(RequestError, match="2 faults") as shown:
        Mixture(sources, seed=0)
    assert "different seq_lengths, [2, 3]" in str(shown.value)
    assert "a is given 2 times; fix: add up its weights" in str(shown.value)


def test_a_list_may_name_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "mixture.yaml"
    file.write_text("[{path: 'packed:~/a.npy', weight: 1}]")
    assert [entry.path for entry in listed(file)] == ["packed:/home/me/a.npy"]
    file.write_text("[{path: 'packed:~nobody-here/a.npy', weight: 1}]")
    with pytest.raises(RequestError, match=r"entry 1: path must be a path, with \./ before a ~"):
        listed(file)


def test_a_weight_without_a_point(tmp_path: Path) -> None:
    """YAML reads 5e-1 as text."""
    file = tmp_path / "mixture.yaml"
    file.write_text("[{path: a, weight: 5e-1}, {path: b, weight: 2}]")
    assert [entry.weight for entry in listed(file)] == [0.5, 2]
    for weight in ("true", "much", "[1]"):
        file.write_text(f"[{{path: a, weight: {weight}}}]")
        with pytest.raises(RequestError, match="entry 1: weight must be a number, and order"):
            listed(file)


def test_a_key_of_a_list_that_stands_twice(tmp_path: Path) -> None:
    file = tmp_path / "mixture.yaml"
    file.write_text("- {path: a, weight: 1}\n- path: b\n  weight: 1\n  weight: 2\n")
    with pytest.raises(RequestError, match=r"entry 2: weight: is given twice, in lines 3 and 4;"):
        listed(file)


def test_a_list_that_has_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("some text")
    write_list(tmp_path / "a.yaml", "text:text", "mixture:b.yaml")
    write_list(tmp_path / "b.yaml", f"mixture:{tmp_path}/a.yaml")
    for name in "ab":
        with pytest.raises(
            RequestError, match=r"^dataset_path: .*mixture:.*\.yaml is part of itself"
        ):
            open_samples(f"mixture:{name}.yaml", 2, "dataset_path", 256, 0)
    write_list(tmp_path / "b.yaml", "mixture:none.yaml")
    with pytest.raises(
        RequestError, match=r"a\.yaml: entry 2: path: b\.yaml: .*none\.yaml: cannot"
    ):
        open_samples("mixture:a.yaml", 2, "dataset_path", 256, 0)
    write_list(tmp_path / "b.yaml", "text:text")
    assert open_samples("mixture:a.yaml", 2, "dataset_path", 256, 0)


def write_list(file: Path, *paths: str) -> None:
    file.write_text("".join(f"- {{path: '{path}', weight: 1}}\n" for path in paths))


def test_samples_beyond_the_end() -> None:
    mixture = mixed((5, 1.0))
    for index in (-1, 5):
        with pytest.raises(IndexError):
            mixture[index]
