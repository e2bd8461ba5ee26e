"""From what nodes saw to faults: no look at anything, only judgement."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from training.job.preflight.blame import Blame, Pair, blame, majority
from training.job.preflight.finding import Fault, Report
from training.job.preflight.names import Names

SKEW = 5.0
"""Seconds that a clock may be off. Those that a time server sets differ by milliseconds: one that
is off by this has none, and drifts on until munge (300 s) and S3 (15 minutes) refuse its word."""

UNTOLD = "which is right cannot be told"


def own(reports: Iterable[Report]) -> list[Fault]:
    """What the nodes found wrong on themselves."""
    return [
        Fault(finding.check, report.rank, fault)
        for report in reports
        for finding in report.findings
        for fault in finding.faults
    ]


def versions(reports: Sequence[Report], names: Names) -> list[Fault]:
    """Every version must be that of the most nodes."""
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
            told = "; ".join(f"{value} on {names.several(r)}" for value, r in having.items())
            faults.append(Fault("versions", None, f"{what}: {told}: {UNTOLD}"))
            continue
        usual = next(value for value, ranks in having.items() if ranks == most)
        for value, ranks in having.items():
            text = f"{what} is {value}, not {usual} as on {names.several(most)}"
            faults += [Fault("versions", rank, text) for rank in sorted(ranks - most)]
    return faults


def folder(nodes: Sequence[int], seen: Mapping[Pair, bool], names: Names) -> list[Fault]:
    """Judge who sees whose file, by pairs in both directions."""
    what = "the same folder as CHECKPOINTS"
    judged = blame(nodes, seen)
    faults = [
        Fault(
            "folder",
            rank,
            "what it writes to CHECKPOINTS is not seen by the others, or not theirs by it",
        )
        for rank in sorted(judged.odd)
    ]
    if judged.apart:
        faults.append(Fault("folder", None, f"{_apart(judged, names)} do not see {what}: {UNTOLD}"))
    return faults + [
        Fault(
            "folder", None, f"{names[one]} and {names[other]} do not see {what}, though others do"
        )
        for one, other in judged.links
    ]


def clocks(offsets: Mapping[int, tuple[float, float]], names: Names) -> list[Fault]:
    """Judge clocks by (seconds ahead of node 0's, how far that may be wrong either way)."""
    if not offsets:
        return []
    usual = statistics.median_low(ahead for ahead, _ in offsets.values())
    off = {
        rank: ahead - usual
        for rank, (ahead, error) in offsets.items()
        if abs(ahead - usual) - error > SKEW
    }
    if 2 * len(off) >= len(offsets):
        told = ", ".join(f"{names[rank]} {ahead:+.1f} s" for rank, (ahead, _) in offsets.items())
        return [Fault("clock", None, f"clocks differ: {told}: {UNTOLD}")]
    return [
        Fault(
            "clock", rank, f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others"
        )
        for rank, ahead in off.items()
    ]


def network(
    nodes: Sequence[int], pairs: Mapping[Pair, bool], reasons: Mapping[int, str], names: Names
) -> list[Fault]:
    """Judge who fails to compute with whom, by the pairs that were tried once all had failed.

    `reasons` has what the nodes of failed pairs said last, by rank.
    """
    judged = blame(nodes, pairs)
    faults = []
    for rank in sorted(judged.odd):
        with_ = {one for pair in pairs for one in pair if rank in pair} - {rank}
        text = f"its all-reduce with {names.several(with_)} fails: {reasons.get(rank, 'no reason')}"
        faults.append(Fault("across", rank, text))
    if judged.apart:
        text = f"{_apart(judged, names)} fail to compute together: {UNTOLD}"
        said = next((reasons[rank] for rank in sorted(reasons)), "")
        faults.append(Fault("across", None, f"{text} ({said})" if said else text))
    for one, other in judged.links:
        text = (
            f"{names[one]} and {names[other]} fail to compute together ({reasons.get(one, '')}), "
            f"though each does with others: the link between them, and {UNTOLD}"
        )
        faults.append(Fault("across", None, text))
    if not faults:
        text = f"{names.several(nodes)} fail to compute together, though every pair tried does not"
        faults.append(Fault("across", None, f"{text}: which node it is cannot be told"))
    return faults


def _apart(judged: Blame, names: Names) -> str:
    return " and ".join(names.several(group) for group in judged.apart)
