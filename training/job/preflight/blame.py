"""Who is at fault, from what was seen between nodes: no look at anything, only arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]  # of ranks


@dataclass(frozen=True)
class Blame:
    """The nodes that are at fault, and what cannot be told."""

    odd: frozenset[int] = frozenset()  # well with none of the majority
    apart: tuple[frozenset[int], ...] = ()  # groups without a majority, each well in itself
    links: tuple[Pair, ...] = ()  # two of the majority that are not well with each other


def majority(groups: Iterable[frozenset[int]]) -> frozenset[int] | None:
    """The group that is larger than every other; None if there is no such."""
    first, *others = sorted(groups, key=len, reverse=True)
    return None if others and len(others[0]) == len(first) else first


def blame(nodes: Iterable[int], pairs: Mapping[Pair, bool]) -> Blame:
    """Judge nodes by the pairs that were tried, True for those that are well together."""
    groups = joined(nodes, [pair for pair, well in pairs.items() if well])
    most = majority(groups)
    if most is None:
        return Blame(apart=tuple(groups))
    links = (pair for pair, well in pairs.items() if not well and most.issuperset(pair))
    return Blame(frozenset().union(*groups) - most, (), tuple(links))


def joined(nodes: Iterable[int], pairs: Iterable[Pair]) -> list[frozenset[int]]:
    """Group the nodes that are joined by pairs, in the order of their lowest ranks."""
    group = {node: {node} for node in nodes}
    for one, other in pairs:
        if group[one] is not group[other]:
            small, large = sorted((group[one], group[other]), key=len)
            large |= small
            group.update(dict.fromkeys(small, large))
    found = {id(members): frozenset(members) for members in group.values()}
    return sorted(found.values(), key=min)


def levels(nodes: Sequence[int], width: int) -> list[list[list[int]]]:
    """Groups of at most `width` in a tree: all are in the first level, their leaders in the next.

    With n nodes there are n / width groups on the first level, so that n nodes make some n * width
    connections where a group connects each with each, and not n * n.
    """
    found = []
    while len(nodes) > 1:
        groups = [list(nodes[start : start + width]) for start in range(0, len(nodes), width)]
        found.append([group for group in groups if len(group) > 1])
        nodes = [group[0] for group in groups]
    return found


def ring(nodes: Sequence[int]) -> list[list[Pair]]:
    """Every node with both its neighbours, in rounds in which each is in one pair at most."""
    count = len(nodes)
    if count < 3:
        return [[(nodes[0], nodes[1])]] if count == 2 else []
    pairs = [(nodes[i], nodes[(i + 1) % count]) for i in range(count)]
    even = count - count % 2
    rounds = [pairs[0:even:2], pairs[1:even:2], pairs[even:]]
    return [one for one in rounds if one]


def further(nodes: Sequence[int], pairs: Mapping[Pair, bool]) -> list[Pair]:
    """Pairs that tell more once the ring is known: each node in one at most, none tried before.

    An odd node may have bad neighbours on both sides: it is tried with one of the majority. Where
    there is no majority, nodes are tried with the ones after their neighbours.
    """
    tried = {frozenset(pair) for pair in pairs}
    judged = blame(nodes, pairs)
    odd = [node for node in nodes if node in judged.odd]
    if judged.apart:
        count = len(nodes)
        wanted = [(nodes[i], nodes[(i + 2) % count]) for i in range(count)]
    else:
        sound = [node for node in nodes if node not in judged.odd]
        wanted = [(one, other) for one in odd for other in sound[: len(odd) + 2]]
    found: list[Pair] = []
    taken: set[int] = set()
    for pair in wanted:
        if frozenset(pair) not in tried and taken.isdisjoint(pair) and pair[0] != pair[1]:
            found.append(pair)
            taken.update(pair)
    return found
