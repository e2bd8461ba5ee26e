"""One lane: its documents, shuffled block by block, as one line of tokens that is cut into rows.

A row has l + 1 tokens, and shares one with the next, so each token but the first is a target once.

Shapes: l sequence length, n tokens of a document.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from training.data.order import shuffled
from training.data.stream_shards import Shards
from training.data.tokenize.tokenizer import Encoder, Ids
from training.errors import TrainingError


@dataclass(frozen=True)
class Place:
    """Where a lane stands: at a token of a document of a block.

    shard, document: where the block begins, the shard by its number in the lane's order. index: of
    the document in the block's shuffled order. token: of the last token that was read.
    """

    epoch: int = 0
    block: int = 0
    shard: int = 0
    document: int = 0
    index: int = 0
    token: int = 0


@dataclass(frozen=True)
class Reading:
    """What all lanes have in common; the settings are those of training.config.config."""

    shards: Shards
    encoder: Encoder
    lanes: int
    seq_length: int
    shuffle_buffer: int
    seed: int
    epochs: int


class Lane:
    """Lane `number`, from a place on. Raises TrainingError where it has no documents."""

    def __init__(self, reading: Reading, number: int, place: Place) -> None:
        self._reading, self._number = reading, number
        self._pieces: deque[tuple[Place, Ids]] = deque()  # what is not read yet, (n,) each
        self._source = self._documents(place)
        shards = reading.shards.count
        self._shards = range(number % shards, shards, reading.lanes)
        self._sharing = range(number % shards, reading.lanes, shards)
        """The lanes that read the same shards, each its own documents of them."""

    @property
    def place(self) -> Place | None:
        """Where to begin again, once something was read."""
        return self._pieces[0][0] if self._pieces else None

    def next_row(self) -> Ids:
        """Read the next l + 1 tokens; fewer, and at last one or none, where the last epoch ends."""
        wanted = self._reading.seq_length + 1
        while sum(len(ids) for _, ids in self._pieces) < wanted:
            piece = next(self._source, None)
            if piece is None:
                break
            self._pieces.append(piece)
        if not self._pieces:
            return np.zeros(0, np.int32)  # (0,)
        row = np.concatenate([ids for _, ids in self._pieces])[:wanted]  # (l + 1,)
        self._pass(len(row) - 1)
        return row

    def _pass(self, tokens: int) -> None:
        while tokens >= len(self._pieces[0][1]):
            tokens -= len(self._pieces.popleft()[1])
        place, ids = self._pieces[0]
        self._pieces[0] = (replace(place, token=place.token + tokens), ids[tokens:])

    def _documents(self, begin: Place) -> Iterator[tuple[Place, Ids]]:
        """Give the tokens of all documents from a place on, with the place of the first of them."""
        epochs = self._reading.epochs
        for epoch in range(begin.epoch, epochs) if epochs else count(begin.epoch):
            start = begin if epoch == begin.epoch else Place(epoch)
            empty = start == Place(epoch)
            for place, ids in self._epoch(start):
                empty = False
                yield place, ids
            if empty and not epochs:
                raise TrainingError(
                    f"{self._reading.shards.name}: has too few documents for "
                    f"{self._reading.lanes:,} sequences a step, each of which reads documents of "
                    f"its own: none is left for number {self._number + 1:,}; take a smaller "
                    "global batch, or text:GLOB or a set on disk",
                    local=True,
                )

    def _epoch(self, begin: Place) -> Iterator[tuple[Place, Ids]]:
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
            place = Place(begin.epoch, number, shard, document)
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
        """Read this lane's documents: text, shard by its number in `order`, number in the shard.

        After a fault that may pass the shard is opened again, and what was read is passed over.
        """
        shards, sharing = self._reading.shards, self._sharing
        mine, patience = sharing.index(self._number), shards.patience()
        while at < len(order):
            try:
                for text in shards.read(order[at], document):
                    patience.progress()
                    document += 1
                    if (document - 1) % len(sharing) == mine:
                        yield text, at, document - 1
                at, document = at + 1, 0
            except TrainingError:
                raise
            except Exception as error:  # the libraries have many ways to say no
                patience.bear(error, shards.where(order[at]))
