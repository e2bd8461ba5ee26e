"""Which nodes of a job train, which wait as spares and which are gone: node 0's list.

Pure: signs of life go in with the seconds that have passed, and the nodes that are lost come out.
Node 0 itself always trains: it has the store of the rendezvous, and the launcher.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

SILENCE = 12.0
"""Seconds without a sign of life after which a node is lost."""
LEFT = "left"
"""Sent instead of a sign of life: the node has given its place to a spare, and ends."""
EMPTY = "left empty"
"""The same, but no spare takes the place."""
DONE = "done"
"""Also sent instead: the node's program is through, which others may not be yet."""


class Place(str, Enum):
    """What has been decided about a node."""

    TRAINS = "trains"
    WAITS = "waits"
    OUT = "out"  # waits but is not called: it has failed too often
    LOST = "lost"
    LEFT = "left"
    ENDS = "ends"  # waits no longer: the job ends


class Roster:
    """The places of all nodes of a job; node n is the n-th of its list."""

    def __init__(self, nodes: int, training: int, worn: Collection[int] = ()) -> None:
        """Let the first `training` nodes that are not worn train, and the others wait.

        Worn nodes, except node 0, train only if there are not enough others.
        """
        order = sorted(range(nodes), key=lambda node: (node > 0 and node in worn, node))
        self.training = training  # how many are to train
        self.places = dict.fromkeys(range(nodes), Place.WAITS)
        for node in order[:training]:
            self.places[node] = Place.TRAINS
        for node in order[training:]:
            if node in worn:
                self.places[node] = Place.OUT
        self._beats: dict[int, str] = {}
        self._silent = dict.fromkeys(range(nodes), 0.0)

    def waiting(self) -> list[int]:
        """Return the spares that have given signs of life, in the order of their calls."""
        return [
            node
            for node, place in self.places.items()
            if place is Place.WAITS and self._beats.get(node)
        ]

    def heard(self, beats: Sequence[str], passed: float) -> list[int]:
        """Take the latest sign of life of each node; return the nodes lost since the last look.

        beats: empty for a node that has given none yet. passed: seconds since the last look.
        """
        lost = []
        for node, beat in enumerate(beats):
            if node == 0 or self.places[node] is Place.LOST or beat in (LEFT, EMPTY, DONE):
                continue
            if beat != self._beats.get(node, ""):
                self._beats[node], self._silent[node] = beat, 0.0
            elif beat:
                self._silent[node] += passed
            if self._silent[node] > SILENCE:
                lost.append(node)
        return lost

    def left(self, beats: Sequence[str]) -> list[int]:
        """Return the nodes that have just given up their places."""
        return [
            node
            for node, beat in enumerate(beats)
            if beat in (LEFT, EMPTY) and self.places[node] is Place.TRAINS
        ]

    def shrink(self) -> None:
        """Let one node fewer train from now on."""
        self.training -= 1

    def call(self) -> int | None:
        """Let the next spare train, and return it; None if there is none."""
        waiting = self.waiting()
        if not waiting:
            return None
        self.places[waiting[0]] = Place.TRAINS
        return waiting[0]
