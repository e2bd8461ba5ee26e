"""Judge from what nodes saw what is wrong, and on which node: pure functions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from training.job.preflight.finding import Fault, Report
from training.job.preflight.settings import NodeNames

Pair = tuple[int, int]  # of ranks

SKEW = 5.0
"""Seconds that a clock may be off. Clocks set by a time server differ by milliseconds: one that is
off by this much has none, and drifts on until munge (300 s) and S3 (15 minutes) reject it."""

UNKNOWN = "which is right is not known"


@dataclass(frozen=True)
class Verdict:
    """The nodes that are at fault, and differences whose fault is not known."""

    odd: frozenset[int] = frozenset()  # works with none of the majority
    apart: tuple[frozenset[int], ...] = ()  # groups without a majority; nodes work within each
    links: tuple[Pair, ...] = ()  # two of the majority that fail with each other


def majority(groups: Iterable[frozenset[int]]) -> frozenset[int] | None:
    """The group that is larger than every other; None if there is none."""
    first, *others = sorted(groups, key=len, reverse=True)
    return None if others and len(others[0]) == len(first) else first


def isolate(nodes: Iterable[int], pairs: Mapping[Pair, bool]) -> Verdict:
    """Judge nodes by the pairs that were tried; True marks a pair that worked."""
    groups = connected(nodes, [pair for pair, well in pairs.items() if well])
    most = majority(groups)
    if most is None:
        return Verdict(apart=tuple(groups))
    links = (pair for pair, well in pairs.items() if not well and most.issuperset(pair))
    return Verdict(frozenset().union(*groups) - most, (), tuple(links))


def connected(nodes: Iterable[int], pairs: Iterable[Pair]) -> list[frozenset[int]]:
    """Group the nodes that pairs connect; groups are in the order of their lowest ranks."""
    group = {node: {node} for node in nodes}
    for one, other in pairs:
        if group[one] is not group[other]:
            small, large = sorted((group[one], group[other]), key=len)
            large |= small
            group.update(dict.fromkeys(small, large))
    found = {id(members): frozenset(members) for members in group.values()}
    return sorted(found.values(), key=min)


def tree_levels(nodes: Sequence[int], width: int) -> list[list[list[int]]]:
    """Group nodes in a tree, `width` to a group: all on the first level, their leaders on the next.

    With n nodes the first level has n / width groups. If a group connects each node with each, that
    makes some n * width connections, and not n * n.
    """
    found = []
    while len(nodes) > 1:
        groups = [list(nodes[start : start + width]) for start in range(0, len(nodes), width)]
        found.append([group for group in groups if len(group) > 1])
        nodes = [group[0] for group in groups]
    return found


def ring_rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Pair every node with both its neighbors, in rounds with each node in at most one pair."""
    count = len(nodes)
    if count < 3:
        return [[(nodes[0], nodes[1])]] if count == 2 else []
    pairs = [(nodes[i], nodes[(i + 1) % count]) for i in range(count)]
    even = count - count % 2
    rounds = [pairs[0:even:2], pairs[1:even:2], pairs[even:]]
    return [one for one in rounds if one]


def further_pairs(nodes: Sequence[int], pairs: Mapping[Pair, bool]) -> list[Pair]:
    """Choose pairs that tell more after the ring: each node in at most one, none tried before.

    An odd node may have bad neighbors on both sides: it is tried with one of the majority. Without
    a majority, nodes are tried with the node after their neighbor.
    """
    tried = {frozenset(pair) for pair in pairs}
    judged = isolate(nodes, pairs)
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


def own_faults(reports: Iterable[Report]) -> list[Fault]:
    """The faults that nodes found on themselves."""
    return [
        Fault(finding.check, report.rank, fault)
        for report in reports
        for finding in report.findings
        for fault in finding.faults
    ]


def version_faults(reports: Sequence[Report], names: NodeNames) -> list[Fault]:
    """Report nodes with other versions than most nodes have."""
    faults = []
    for what in sorted({name for report in reports for name in report.versions}):
        having: defaultdict[str, set[int]] = defaultdict(set)
        for report in reports:
            if what in report.versions:
                having[report.versions[what]].add(report.rank)
        if len(having) < 2:
            continue
        most = majority([frozenset(ranks) for ranks in having.values()])
        if most is None:
            values = "; ".join(f"{value} on {names.several(r)}" for value, r in having.items())
            faults.append(Fault("versions", None, f"{what}: {values}: {UNKNOWN}"))
            continue
        usual = next(value for value, ranks in having.items() if ranks == most)
        for value, ranks in having.items():
            text = f"{what} is {value}, not {usual} as on {names.several(most)}"
            faults += [Fault("versions", rank, text) for rank in sorted(ranks - most)]
    return faults


def folder_faults(nodes: Sequence[int], seen: Mapping[Pair, bool], names: NodeNames) -> list[Fault]:
    """Judge which nodes see each other's files; a pair covers both directions."""
    what = "the same folder as CHECKPOINTS"
    judged = isolate(nodes, seen)
    faults = [
        Fault(
            "folder",
            rank,
            "what it writes to CHECKPOINTS is not seen by the others, or not theirs by it",
        )
        for rank in sorted(judged.odd)
    ]
    if judged.apart:
        faults.append(
            Fault("folder", None, f"{_apart(judged, names)} do not see {what}: {UNKNOWN}")
        )
    return faults + [
        Fault(
            "folder", None, f"{names[one]} and {names[other]} do not see {what}, though others do"
        )
        for one, other in judged.links
    ]


def clock_faults(offsets: Mapping[int, tuple[float, float]], names: NodeNames) -> list[Fault]:
    """Judge clocks; offsets are (seconds ahead of node 0, error of that in either direction)."""
    if not offsets:
        return []
    usual = statistics.median_low(ahead for ahead, _ in offsets.values())
    off = {
        rank: ahead - usual
        for rank, (ahead, error) in offsets.items()
        if abs(ahead - usual) - error > SKEW
    }
    if 2 * len(off) >= len(offsets):
        values = ", ".join(f"{names[rank]} {ahead:+.1f} s" for rank, (ahead, _) in offsets.items())
        return [Fault("clock", None, f"clocks differ: {values}: {UNKNOWN}")]
    return [
        Fault(
            "clock", rank, f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others"
        )
        for rank, ahead in off.items()
    ]


def network_faults(
    nodes: Sequence[int], pairs: Mapping[Pair, bool], reasons: Mapping[int, str], names: NodeNames
) -> list[Fault]:
    """Judge which nodes fail to compute together, by pairs tried after all together had failed.

    `reasons` has the last error of each node of a failed pair, by rank.
    """
    judged = isolate(nodes, pairs)
    faults = []
    for rank in sorted(judged.odd):
        with_ = {one for pair in pairs for one in pair if rank in pair} - {rank}
        text = f"its all-reduce with {names.several(with_)} fails: {reasons.get(rank, 'no reason')}"
        faults.append(Fault("across", rank, text))
    if judged.apart:
        text = f"{_apart(judged, names)} fail to compute together: {UNKNOWN}"
        said = next((reasons[rank] for rank in sorted(reasons)), "")
        faults.append(Fault("across", None, f"{text} ({said})" if said else text))
    for one, other in judged.links:
        text = (
            f"{names[one]} and {names[other]} fail to compute together ({reasons.get(one, '')}), "
            f"though each does with others: the link between them, and {UNKNOWN}"
        )
        faults.append(Fault("across", None, text))
    if not faults:
        text = f"{names.several(nodes)} fail to compute together, though every pair tried does not"
        faults.append(Fault("across", None, f"{text}: which node it is is not known"))
    return faults


def _apart(judged: Verdict, names: NodeNames) -> str:
    return " and ".join(names.several(group) for group in judged.apart)
