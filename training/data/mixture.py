"""Several weighted sources read as one, in a fixed pattern that only weights and seed decide.

A pattern has about a thousand slots, divided among the sources by their weights, rounded. Sample k
of the mixture takes slot k mod S, S being the pattern's length. The sample's number in its source
is the number of that source's slots before it, in this pattern and in completed ones, plus its
`order`.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch

from training.cli import with_home
from training.config import yaml_file
from training.config.sections import STREAM
from training.config.setting import number_of
from training.data.base import Sample, Samples
from training.data.sampler import shuffled
from training.errors import RequestError

SLOTS = 1000
TOLERANCE = Fraction(1, 100)
"""A weight that rounding changes by more than this fraction is reported."""

MIXTURE = "mixture:"
_KEYS = {"path", "weight", "order"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of a mixture. `order` is the number of its first sample that is read."""

    name: str
    samples: Samples
    weight: float
    order: int = 0


class Entry(NamedTuple):
    """What a mixture's file states about a source; `where` names file and entry for messages."""

    path: str
    weight: float
    order: int
    where: str


def listed(file: Path, above: tuple[Path, ...] = ()) -> list[Entry]:
    """Read the file of a mixture. Raises RequestError naming the file and the entry.

    above: the mixtures that this one is part of; if it listed one of them, it would have no end.
    """
    try:
        entries = yaml_file.read(file, str(file))
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from error
    if not isinstance(entries, list) or not entries:
        raise RequestError(f"{file}: must be a list of entries with path, weight and order")
    found = []
    for number, entry in enumerate(entries, 1):
        where = f"{file}: entry {number}"
        if not isinstance(entry, dict) or not {"path", "weight"} <= entry.keys() <= _KEYS:
            raise RequestError(f"{where}: must have path and weight, and may have order")
        path, order = str(entry["path"]), entry.get("order", 0)
        try:
            path = with_home(path)
        except ValueError as error:
            raise RequestError(f"{where}: path must be {error}, not {path!r}") from error
        try:
            weight = number_of(entry["weight"])
        except ValueError:
            weight = None
        if weight is None or type(order) is not int:
            raise RequestError(f"{where}: weight must be a number, and order a whole number")
        if path.startswith(STREAM):
            raise RequestError(
                f"{where}: path: a mixture cannot read a stream, whose samples have no numbers"
            )
        if path.startswith(MIXTURE):
            _look_into(path, where, (*above, file.resolve()))
        found.append(Entry(path, weight, order, where))
    return found


def _look_into(path: str, where: str, above: tuple[Path, ...]) -> None:
    """Check the file of a mixture within a mixture. Raises RequestError."""
    file = Path(path.removeprefix(MIXTURE))
    if file.resolve() in above:
        raise RequestError(f"{where}: path: {path} is part of itself; fix: leave it out")
    try:
        listed(file, above)
    except RequestError as error:
        raise RequestError(f"{where}: path: {error}") from error


class Mixture:
    """A mixture, as samples (see training.data.base); sources of weight 0 are left out.

    A source that comes to its end begins again with its sample 0. The length is the number of
    samples until every source has been read through once: one pass over the source that is largest
    for its weight, in which the others are read more than once (see `passes`). After that, a Reader
    begins again with the mixture's sample 0, so each epoch is like the first. The mixture has its
    own order: a Reader reads it with shuffle=False, and leaves samples out by `skip`.

    If one source weighs its targets, those of the others weigh 1. `notes` has a line for each
    weight that rounding changes by more than 1 %.

    Raises RequestError for invalid weights, names given twice, sources that are empty or of another
    seq_length, and an `order` beyond a source.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, slots: int = SLOTS) -> None:
        faults = _faults(sources)
        if faults:
            raise RequestError.of([f"mixture: {fault}" for fault in faults])
        self._sources = [source for source in sources if source.weight > 0]
        weights = [Fraction(source.weight) for source in self._sources]
        self._slots = apportioned(weights, max(slots, len(weights)))
        self.notes = _notes(self._sources, weights, self._slots)
        self._pattern, self._places = _pattern(self._slots, f"mixture/{seed}")
        self._counts = [
            bisect_left(self._places[which], place) for place, which in enumerate(self._pattern)
        ]
        self._length = 1 + max(self._last_of(which) for which in range(len(self._sources)))
        samples = [source.samples for source in self._sources]
        self.seq_length = samples[0].seq_length
        self.vocab_size = max(one.vocab_size for one in samples)
        self._weighted = any(one[0].weights is not None for one in samples)
        self.knows_documents = any(one.knows_documents for one in samples)
        parts = [
            f"{source.samples.fingerprint} {taken} {source.order}"
            for source, taken in zip(self._sources, self._slots, strict=True)
        ]
        facts = "\n".join([f"mixture {seed}", *parts])
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        which, number = self.locate(index)
        sample = self._sources[which].samples[number]
        if self._weighted and sample.weights is None:
            sample = replace(sample, weights=torch.ones(self.seq_length))  # (l,)
        if self.knows_documents and sample.seq_idx is None:
            whole = torch.zeros(self.seq_length, dtype=torch.int32)  # (l,)
            sample = replace(sample, seq_idx=whole)
        return sample

    def locate(self, index: int) -> tuple[int, int]:
        """Return a sample's source (not counting those of weight 0) and its number there."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        patterns, place = divmod(index, len(self._pattern))
        which = self._pattern[place]
        source = self._sources[which]
        read = patterns * self._slots[which] + self._counts[place]
        return which, (read + source.order) % len(source.samples)

    def passes(self, samples: int) -> dict[str, float]:
        """Return how often each source is read through in a run's first `samples` samples.

        Above 1, some of it is read again. Skipped samples count, as an earlier run has read them.
        """
        epochs, rest = divmod(samples, self._length)
        return {
            source.name: (epochs * self._read(which, self._length) + self._read(which, rest))
            / len(source.samples)
            for which, source in enumerate(self._sources)
        }

    def described(self) -> str:
        return "; ".join(f"{source.name}: {source.samples.described()}" for source in self._sources)

    def is_here(self) -> bool:
        return all(source.samples.is_here() for source in self._sources)

    def _read(self, which: int, index: int) -> int:
        """Return how many samples of a source come before sample `index` of the mixture."""
        patterns, place = divmod(index, len(self._pattern))
        return patterns * self._slots[which] + bisect_left(self._places[which], place)

    def _last_of(self, which: int) -> int:
        """Return the sample with which a source has been read through for the first time."""
        last = len(self._sources[which].samples) - 1
        patterns, place = divmod(last, self._slots[which])
        return patterns * len(self._pattern) + self._places[which][place]


def apportioned(weights: Sequence[Fraction], slots: int) -> list[int]:
    """Divide `slots` whole slots by weights, which are above 0, with at least one slot for each.

    Hamilton's method of largest remainders: each quota is rounded down, and the slots that are left
    go to those that lack most. If the minimum of one each takes too many, those that are most above
    their quota give some up.
    """
    total = sum(weights)
    quotas = [weight * slots / total for weight in weights]
    taken = [max(1, math.floor(quota)) for quota in quotas]
    while (missing := slots - sum(taken)) != 0:
        lack = [quota - have for quota, have in zip(quotas, taken, strict=True)]
        if missing > 0:
            taken[lack.index(max(lack))] += 1
        else:
            able = [i for i, have in enumerate(taken) if have > 1]
            taken[min(able, key=lambda i: lack[i])] -= 1
    return taken


def _pattern(slots: list[int], key: str) -> tuple[list[int], list[list[int]]]:
    """Return which source has each place of the pattern, and which places each source has."""
    row = [which for which, taken in enumerate(slots) for _ in range(taken)]
    pattern = [row[shuffled(place, len(row), key)] for place in range(len(row))]
    places: list[list[int]] = [[] for _ in slots]
    for place, which in enumerate(pattern):
        places[which].append(place)
    return pattern, places


def _faults(sources: Sequence[Source]) -> list[str]:
    found = []
    lengths = sorted({source.samples.seq_length for source in sources})
    if len(lengths) > 1:
        found.append(f"the sources have different seq_lengths, {lengths}; fix: open all with one")
    if not any(source.weight > 0 for source in sources):
        found.append("no source has a weight above 0; fix: give one to at least one")
    names = [source.name for source in sources]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            found.append(f"{name} is given {names.count(name)} times; fix: add up its weights")
    for source in sources:
        name, count = source.name, len(source.samples)
        if not (math.isfinite(source.weight) and source.weight >= 0):
            found.append(f"{name}: weight is {source.weight}, but must be a number of at least 0")
        elif source.weight and not count:
            found.append(
                f"{name}: has {source.samples.described()}, which make no sample of seq_length "
                f"{source.samples.seq_length}; fix: give it more, or a weight of 0"
            )
        elif source.weight and not 0 <= source.order < count:
            found.append(f"{name}: order is {source.order:,}, but must be from 0 to {count - 1:,}")
    return found


def _notes(sources: list[Source], weights: list[Fraction], slots: list[int]) -> list[str]:
    """Return a line for each weight that differs from what was asked for."""
    found = []
    for source, weight, taken in zip(sources, weights, slots, strict=True):
        asked, given = weight / sum(weights), Fraction(taken, sum(slots))
        if abs(given - asked) > TOLERANCE * asked:
            found.append(
                f"mixture: {source.name} is {float(given):.4%} of the samples instead of "
                f"{float(asked):.4%}: {taken} of {sum(slots):,} slots"
            )
    return found
