"""How processes find each other: what one store on the first node has to answer.

torchrun's c10d rendezvous keeps one value, the list of all nodes. A node joins by reading it and
writing it back longer, if nobody else has written meanwhile (compare_set); else it does so again.
A compare_set sends the old and the new value and gets the value that is there: three of them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Store:
    """What the store and the nodes take, in seconds and bytes."""

    request: float  # s, at the store
    rate: float  # bytes/s, at the store
    participant: float  # bytes of a node in the value
    turn: float  # s, a message and its answer
    pickle: float  # s, to read and write the value, a node in it

    def read(self, nodes: float) -> float:
        """Give the seconds at the store of a get, of a value with so many nodes."""
        return self.request + nodes * self.participant / self.rate

    def write(self, nodes: float) -> float:
        """Give the seconds at the store of a compare_set."""
        return self.request + 3 * nodes * self.participant / self.rate

    def away(self, nodes: float) -> float:
        """Give the seconds from the store's answer to a node's next request."""
        return self.turn + nodes * self.pickle


@dataclass(frozen=True)
class Habits:
    """What a node does beside joining, in seconds: torchrun's own times."""

    poll: float  # between reads of the value, once it is in the list
    beat: float  # age of its last write after which it writes again, to be known to live
    expiry: float  # age at which the others take it for dead, and off the list


@dataclass(frozen=True)
class Meeting:
    """How a rendezvous went: nodes in the list at its end, compare_sets, and bytes of those."""

    joined: int
    seconds: float
    writes: int
    bytes: float


def meeting(nodes: int, store: Store) -> Meeting:
    """Compute it for nodes that all come at once, before any must write again.

    Of those that have not joined, one gets through a round, and all of them ask once in it. So
    there are n (n + 1) / 2 compare_sets, and a round takes what the store needs for them, or what
    one node needs to ask again.
    """
    seconds = size = 0.0
    for joined in range(nodes):
        asking = nodes - joined
        seconds += max(asking * store.write(joined), store.write(joined) + store.away(joined))
        size += asking * 3 * joined * store.participant
    return Meeting(nodes, seconds, nodes * (nodes + 1) // 2, size)


def simulate(starts: Array, store: Store, habits: Habits, limit: float) -> Meeting:
    """Let nodes that start at `starts` (nodes,) meet; it ends when all are in the list, or then.

    The store answers one request after the other. Whoever writes takes those off the list whose
    last write is too old; they join again.
    """
    nodes = len(starts)
    # When a request is at the store, whose, and of which version of the value; -1: a read.
    events = [(float(start), node, -1) for node, start in enumerate(starts)]
    heapq.heapify(events)
    written: OrderedDict[int, float] = OrderedDict()  # the list: nodes, and when, the oldest first
    version = writes = 0
    free = size = 0.0
    while len(written) < nodes and free < limit:
        at, node, known = heapq.heappop(events)
        value = len(written)
        free = max(at, free) + (store.read(value) if known < 0 else store.write(value))
        if known >= 0:
            writes += 1
            size += 3 * value * store.participant
        if known == version:
            version += 1
            written[node] = at
            written.move_to_end(node)
            while next(iter(written.values())) < at - habits.expiry:
                written.popitem(last=False)
        if written.get(node, -inf) > free - habits.beat:
            heapq.heappush(events, (free + habits.poll, node, -1))
        else:
            heapq.heappush(events, (free + store.away(len(written)), node, version))
    return Meeting(len(written), free - float(starts.min()), writes, size)


def polled(nodes: int, store: Store, poll: float) -> float:
    """Give the bytes/s that the store sends while a job runs: each node reads the value a poll."""
    return nodes * nodes * store.participant / poll


def most(store: Store, beat: float) -> int:
    """Give the most nodes that the value can hold: each writes once in `beat` seconds.

    Writes go one after the other, each with the time of its node to read the one before.
    """
    nodes = 1
    while (nodes + 1) * (store.write(nodes + 1) + store.away(nodes + 1)) <= beat:
        nodes += 1
    return nodes


def mesh(ranks: int, address: float) -> tuple[int, float]:
    """Count what gloo asks of the store to join every rank with every other: requests, bytes.

    A rank writes its addresses (`address` bytes, and 8 for each rank), and waits for and reads
    those of every rank.
    """
    return ranks * (2 * ranks + 1), float(ranks) * ranks * (address + 8 * ranks)
