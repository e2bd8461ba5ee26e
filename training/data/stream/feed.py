"""One rank's feed of a stream: the rows of its lanes, batch by batch.

Terms: a lane gives one sequence to every step, so there are as many lanes as a step has sequences
over all its ranks and batches. Lane k has its own part of the documents, which come in shards (the
files of a set): its own shards if there are at least as many as lanes, else every n-th document of
a shard that n lanes share. A block is a run of shuffle_buffer documents of a lane, which are
shuffled among themselves. So the order depends only on the set, the seed, shuffle_buffer and the
number of lanes.

A lane's documents are concatenated and cut into rows. A row has l + 1 tokens and shares one with
the next, so each token except the first is a target once.

Shapes: l sequence length, n tokens of a document, r rows that are read at once.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from training.config.config import Config
from training.config.sections import STREAM
from training.data.base import BatchPart, Gather, Sample, batched, begun
from training.data.sampler import OTHER_DATA, shuffled
from training.data.splits import NoSplit
from training.data.stream.shards import Shards
from training.data.tokenize.tokenizer import Encoder, Ids, Tokenizer, open_tokenizer
from training.errors import RequestError, TrainingError
from training.ops.loss import IGNORED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanePlace:
    """Where a lane stands: at a token of a document of a block.

    shard, document: where the block begins, with the shard's number in the lane's order. index: the
    document's number in the block's shuffled order. token: number of the last token that was read.
    """

    epoch: int = 0
    block: int = 0
    shard: int = 0
    document: int = 0
    index: int = 0
    token: int = 0


@dataclass(frozen=True)
class StreamReading:
    """What all lanes have in common; the settings are those in training.config.config."""

    shards: Shards
    encoder: Encoder
    lanes: int
    seq_length: int
    shuffle_buffer: int
    seed: int
    epochs: int


class Row(NamedTuple):
    """Tokens of a lane, (l + 1,) or fewer, and where documents end, as offsets in the row."""

    ids: Ids
    ends: Sequence[int]


NO_ROW = Row(np.empty(0, np.int64), ())


class StreamLane:
    """Lane `number`, from a place on. Raises TrainingError if it has no documents."""

    def __init__(self, reading: StreamReading, number: int, place: LanePlace) -> None:
        self._reading, self._number = reading, number
        self._pieces: deque[tuple[LanePlace, Ids]] = deque()  # not read yet, (n,) each
        self._source = self._documents(place)
        shards = reading.shards.count
        self._shards = range(number % shards, shards, reading.lanes)
        self._sharing = range(number % shards, reading.lanes, shards)
        """The lanes that read the same shards, each its own documents in them."""

    @property
    def place(self) -> LanePlace | None:
        """Where to resume; None if nothing was read."""
        return self._pieces[0][0] if self._pieces else None

    def next_row(self) -> Row:
        """Read the next l + 1 tokens; fewer, and finally one or none, as the last epoch ends."""
        wanted = self._reading.seq_length + 1
        while sum(len(ids) for _, ids in self._pieces) < wanted:
            piece = next(self._source, None)
            if piece is None:
                break
            self._pieces.append(piece)
        if not self._pieces:
            return Row(np.zeros(0, np.int32), [])
        ends = list(accumulate(len(ids) for _, ids in self._pieces))
        # Cut before concatenating, so that a long document's rest is not copied for every row.
        begins = [0, *ends[:-1]]
        pieces = zip(begins, self._pieces, strict=True)
        row = np.concatenate([ids[: wanted - at] for at, (_, ids) in pieces])  # (l + 1,)
        self._pass(len(row) - 1)
        return Row(row, ends)

    def _pass(self, tokens: int) -> None:
        while tokens >= len(self._pieces[0][1]):
            tokens -= len(self._pieces.popleft()[1])
        place, ids = self._pieces[0]
        self._pieces[0] = (replace(place, token=place.token + tokens), ids[tokens:])

    def _documents(self, begin: LanePlace) -> Iterator[tuple[LanePlace, Ids]]:
        """Yield the tokens of each document from a place on, with the place of the first token."""
        epochs = self._reading.epochs
        for epoch in range(begin.epoch, epochs) if epochs else count(begin.epoch):
            start = begin if epoch == begin.epoch else LanePlace(epoch)
            empty = start == LanePlace(epoch)
            for place, ids in self._epoch(start):
                empty = False
                yield place, ids
            if empty and not epochs:
                raise TrainingError(
                    f"{self._reading.shards.name}: has too few documents for "
                    f"{self._reading.lanes:,} sequences a step, each of which reads documents of "
                    f"its own: none is left for number {self._number + 1:,}, which reads "
                    f"{self._reading.shards.where(self._shards[0])}; fix: leave out files without "
                    "texts, or take a smaller global batch, text:GLOB or a set on disk",
                    local=True,
                )

    def _epoch(self, begin: LanePlace) -> Iterator[tuple[LanePlace, Ids]]:
        reading = self._reading
        key = f"{reading.seed}/{begin.epoch}/{self._number}/{reading.lanes}"
        order = list(self._shards)
        if reading.shuffle_buffer > 1:
            order = [order[shuffled(at, len(order), key)] for at in range(len(order))]
        texts = self._texts(order, begin.shard, begin.document)
        for number in count(begin.block):
            block = list(islice(texts, reading.shuffle_buffer))
            if not block:
                return
            _, shard, document = block[0]
            place = LanePlace(begin.epoch, number, shard, document)
            first = begin.index if number == begin.block else 0
            for index in range(first, len(block)):
                which = shuffled(index, len(block), f"{key}/{number}")
                ids = reading.encoder.encode([block[which][0]])  # (n,)
                skip = begin.token if (number, index) == (begin.block, begin.index) else 0
                if len(ids) > skip:
                    yield replace(place, index=index, token=skip), ids[skip:]

    def _texts(
        self, order: Sequence[int], at: int, document: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield this lane's documents: text, number of the shard in `order`, number in the shard.

        After a fault that may pass, the shard is opened again, and what was read is skipped.
        """
        shards, sharing = self._reading.shards, self._sharing
        mine, backoff = sharing.index(self._number), shards.backoff()
        while at < len(order):
            try:
                for text in shards.read(order[at], document):
                    backoff.progress()
                    document += 1
                    if (document - 1) % len(sharing) == mine:
                        yield text, at, document - 1
                at, document = at + 1, 0
            except TrainingError:
                raise
            except Exception as error:  # the libraries have many ways to say no
                backoff.wait(error, shards.where(order[at]))


def open_shards(config: Config, setting: str) -> Shards:
    """Find the shards of a stream, for a setting of dataset_path or eval_dataset_path.

    Raises RequestError, also if the first document cannot be read.
    """
    data, training = config.data, setting == "dataset_path"
    name = getattr(data, setting).removeprefix(STREAM)
    if not name:
        raise RequestError(f"{setting}: {STREAM} must be followed by a set, files or a URL")
    split_setting = "dataset_split" if training else "eval_split"
    split = getattr(data, split_setting)
    try:
        shards = Shards(
            name, data.dataset_config, split, data.stream_retries, held_out=not training
        )
        shards.tried(lambda: next(shards.read(0, 0), None))
        for line in shards.described():
            log.info(f"{setting}: {line}")
    except NoSplit as error:
        raise RequestError(f"{split_setting}: {error}") from error
    except RequestError as error:
        raise RequestError(f"{setting}: {error}") from error
    return shards


def stream_of(config: Config, setting: str, shards: Shards, rank: int, world_size: int) -> Stream:
    """Make a rank's stream; held-out data is read in order and once.

    Raises RequestError for a tokenizer that cannot be opened.
    """
    data, training = config.data, setting == "dataset_path"
    tokenizer = _tokenizer(data.tokenizer)
    batch_size = data.batch_size if training else data.eval_batch_size or data.batch_size
    accumulation = data.gradient_accumulation if training else 1
    reading = StreamReading(
        shards=shards,
        encoder=Encoder(tokenizer, append_eos=True),
        lanes=(data.global_batch if training else 0) or batch_size * world_size * accumulation,
        seq_length=data.seq_length,
        shuffle_buffer=data.shuffle_buffer if training else 1,
        seed=config.run.seed,
        epochs=data.epochs if training else 1,
    )
    return Stream(
        reading,
        tokenizer,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        accumulation=accumulation,
    )


def _tokenizer(name: str) -> Tokenizer:
    if not name:
        raise RequestError(
            "tokenizer: a stream needs one: bytes, or a tokenizer's file, folder or name on the hub"
        )
    try:
        return open_tokenizer(name)
    except RequestError as error:
        raise RequestError(str(error).removeprefix("--")) from error


class Stream:
    """A rank's lanes, a DataFeed (see training.data.base).

    With `epochs`, a lane that ends before others gives rows without targets.
    """

    documents, knows_documents = False, True

    def __init__(
        self,
        reading: StreamReading,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        accumulation: int,
    ) -> None:
        self._reading, self.vocab_size = reading, tokenizer.vocab_size
        self.batch_size, self.accumulation = batch_size, accumulation
        self._rank, self._at_once = rank, batch_size * world_size
        self.step_sequences = reading.lanes
        self.position, self._first = 0, LanePlace()
        self._places: dict[int, LanePlace] = {}  # of the lanes that were read
        self._open: dict[int, StreamLane] = {}
        shards = reading.shards
        facts = [
            f"{tokenizer.name if not tokenizer.definition else ''} {tokenizer.fingerprint}",
            f"{reading.shuffle_buffer} {reading.seed}",
        ]
        ended = [*facts, f"{tokenizer.eos}"]
        self.fingerprint = _digest(f"stream {shards.fingerprint}", *ended)
        # Fingerprints of earlier versions do not cover the files' sizes, or the end of text.
        self._earlier = {_digest(f"stream {shards.names}", *some) for some in (facts, ended)}
        self.notes: Sequence[str] = [f"WARNING: {warning}" for warning in tokenizer.warnings]
        if shards.count < reading.lanes:
            self.notes = [
                *self.notes,
                f"{shards.name} has {shards.count:,} files for {reading.lanes:,} sequences a step: "
                "several read the same file, each the whole of it to train on its own part",
            ]

    def next_rows(self, rows: range) -> BatchPart:
        """Read these rows of the rank's next batch, each from its own lane."""
        read = []
        lanes: dict[int, tuple[int, ...]] = {}
        first = self.position % self.step_sequences + self._rank * self.batch_size
        for row in rows:
            number = first + row
            if number >= self.step_sequences:
                read.append(NO_ROW)
                continue
            lane = self._open.get(number)
            if lane is None:
                lane = self._open[number] = StreamLane(
                    self._reading, number, self._places.get(number, self._first)
                )
            read.append(lane.next_row())
            if lane.place is not None:
                lanes[number] = astuple(lane.place)
        part = BatchPart(
            batched([_sample(row, self._reading.seq_length) for row in read], self.documents),
            lanes,
            spent=all(len(row.ids) < 2 for row in read),
        )
        self.took(part)
        return part

    def took(self, part: BatchPart) -> None:
        self.position += min(
            self._at_once, self.step_sequences - self.position % self.step_sequences
        )
        self._places = {
            **self._places,
            **{number: LanePlace(*place) for number, place in part.lanes.items()},
        }

    def rewind(self) -> None:
        self.position, self._places, self._open = 0, {}, {}

    def state(self, gather: Gather) -> dict[str, Any]:
        """Return where every lane of every rank stands, for a checkpoint (a collective call)."""
        mine = {
            number: astuple(place)
            for number, place in self._places.items()
            if number % self._at_once // self.batch_size == self._rank
        }
        lanes = {number: place for some in gather(mine) for number, place in some.items()}
        return {
            "fingerprint": self.fingerprint,
            "position": self.position,
            "sequences": self._reading.lanes,
            "first": " ".join(map(str, astuple(self._first))),
            "lanes": {str(n): " ".join(map(str, place)) for n, place in sorted(lanes.items())},
        }

    def resume(self, state: dict[str, Any]) -> str | None:
        """Continue where a checkpoint stood, or return why not, and what is read instead.

        Another number of lanes divides the documents differently: then the epoch that was under way
        begins again, in another order.
        """
        if state["fingerprint"] not in {self.fingerprint, *self._earlier}:
            return OTHER_DATA
        self.rewind()
        first = LanePlace(*map(int, state["first"].split()))
        places = {int(n): LanePlace(*map(int, at.split())) for n, at in state["lanes"].items()}
        now, before = self._reading.lanes, state["sequences"]
        if now == before:
            self.position, self._places, self._first = state["position"], places, first
            return None
        self.position = -(-state["position"] // now) * now
        epoch = max((place.epoch for place in places.values()), default=first.epoch)
        self._first = LanePlace(epoch)
        return (
            f"a step had {before:,} sequences and now has {now:,}, which divides the stream "
            f"differently: its epoch {epoch + 1} begins again in another order, and what was read "
            "of it is read again"
        )


def _digest(*facts: str) -> str:
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


def _sample(row: Row, length: int) -> Sample:
    """Make a sample (l,) of l + 1 tokens; of fewer, one with nothing to predict after the last."""
    ids = row.ids  # (l + 1,) or less
    inputs = np.zeros(length, np.int64)  # (l,)
    targets = np.full(length, IGNORED, np.int64)  # (l,)
    known = max(len(ids) - 1, 0)
    inputs[:known], targets[:known] = ids[:-1], ids[1:]
    documents = begun(row.ends, 0, length)  # (l,)
    return Sample(torch.from_numpy(inputs), torch.from_numpy(targets), None, documents)
