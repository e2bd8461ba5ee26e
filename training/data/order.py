"""A shuffled order that needs no list: the place of one item is computed on its own."""

from __future__ import annotations

import hashlib

ROUNDS = 4


def shuffled(place: int, count: int, key: str) -> int:
    """Map 0 ... count - 1 one to one onto itself, differently for every key.

    A Feistel network over the smallest even number of bits that holds `count` (Luby & Rackoff
    1988: four rounds), walked until it lands inside (Black & Rogaway 2002, cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix(key, turn, right) & mask)
        place = left << half | right
        if place < count:
            return place


def _mix(key: str, turn: int, value: int) -> int:
    digest = hashlib.blake2b(f"{key}/{turn}/{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
