"""Compare the replays of several nodes: pure functions, without files or processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one replay on one node."""

    step: int = 0  # of the checkpoint
    steps: tuple[str, ...] = ()  # what each step gave, as text
    weights: str = ""  # a digest of the weights at the end
    error: str = ""  # why there is no result; empty if there is one

    @classmethod
    def of(cls, text: str) -> Outcome:
        """Parse what the property `text` gives. Raises ValueError."""
        try:
            record = json.loads(text)
            return cls(
                step=int(record["step"]),
                steps=tuple(str(one) for one in record["steps"]),
                weights=str(record["weights"]),
                error=str(record["error"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no outcome of a replay: {error}") from error

    @property
    def text(self) -> str:
        record = {"step": self.step, "steps": self.steps, "weights": self.weights}
        return json.dumps({**record, "error": self.error})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The nodes that are bad, and a description of what was found."""

    bad: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    is_open: bool = False  # nodes differ, but which of them is bad is not known
    was_tried: bool = True


def compare(outcomes: Mapping[int, Outcome], names: Mapping[int, str]) -> Verdict:
    """Compare one replay of each node: the outcome of more than half of them is right.

    names: the names of the nodes, by node rank.
    """
    steps = Counter(one.step for one in outcomes.values() if not one.error)
    if len(steps) > 1:
        return _apart(outcomes, steps.most_common(1)[0][0], names)
    # Each node may word the reason of a failure differently.
    kinds = {
        node: replace(one, error="failed" if one.error else "") for node, one in outcomes.items()
    }
    right, most = Counter(kinds.values()).most_common(1)[0]
    if most == len(outcomes) and not right.error:
        return Verdict(lines=(_agreed(right, len(outcomes)),))
    if most * 2 <= len(outcomes):
        lines = [f"{names[node]}: {_described(one)}" for node, one in sorted(outcomes.items())]
        return Verdict(lines=tuple(lines), is_open=True)
    if right.error:  # what most cannot do is no node's fault
        why = next(one.error for _, one in sorted(outcomes.items()) if one.error)
        return Verdict(lines=(f"it could not be tried: {why}",), was_tried=False)
    bad = {node: one for node, one in sorted(outcomes.items()) if kinds[node] != right}
    lines = [f"{names[node]}: {_difference(one, right, most)}" for node, one in bad.items()]
    return Verdict(bad=tuple(bad), lines=tuple(lines))


def compare_again(
    first: Mapping[int, Outcome], second: Mapping[int, Outcome], names: Mapping[int, str]
) -> Verdict:
    """Compare each node's second replay with its own first one, after the nodes differed.

    A node whose two replays differ is bad. If there is none, as with a node that always computes
    the same wrong number, the nodes have to be tried together with one more.
    """
    steps = {one.step for one in (*first.values(), *second.values()) if not one.error}
    if len(steps) > 1:
        before = next(one.step for one in first.values() if not one.error)
        return _apart(second, before, names)
    bad = tuple(node for node in sorted(first) if first[node] != second[node])
    if len(bad) == len(first):
        line = "on no node do two replays agree: the run is not deterministic, so none can be named"
        return Verdict(lines=(line,), is_open=True)
    if bad:
        lines = [
            f"{names[node]}: its own two replays differ: {_difference(second[node], first[node])}"
            for node in bad
        ]
        return Verdict(bad=bad, lines=tuple(lines))
    named = ", ".join(names[node] for node in sorted(first))
    line = f"{named} differ, each always in the same way: one more node would tell which is wrong"
    return Verdict(lines=(line,), is_open=True)


def _apart(outcomes: Mapping[int, Outcome], step: int, names: Mapping[int, str]) -> Verdict:
    """Compare nothing, as nodes began from different checkpoints: differing numbers prove nothing.

    One may still see an older folder, for example over NFS.
    """
    odd = [
        f"{names[node]} from that of step {one.step}"
        for node, one in sorted(outcomes.items())
        if not one.error and one.step != step
    ]
    why = f"not all nodes begin from the checkpoint of step {step}: {', '.join(odd)}"
    return Verdict(lines=(f"it could not be tried: {why}",), was_tried=False)


def _agreed(outcome: Outcome, nodes: int) -> str:
    return (
        f"{nodes} nodes give the same bits for {_span(outcome)}: no node is bad, so look for the "
        "cause in the data, the settings or the code"
    )


def _described(outcome: Outcome) -> str:
    return outcome.error or f"{_span(outcome)}, weights {outcome.weights[:8]}"


def _difference(one: Outcome, other: Outcome, nodes: int = 0) -> str:
    """Say where `one` first differs from `other`: that of `nodes` nodes, or if 0 its own before."""
    whose = f"{nodes} others" if nodes else "before"
    if one.error or other.error:
        return one.error or f"{_span(one)}, and {whose}: {other.error}"
    at = _first_difference(one.steps, other.steps)
    if at is None:
        return f"after {_span(one)} its weights are not those of {whose}"
    return f"step {one.step + at + 1} gives {one.steps[at]}, and {other.steps[at]} on {whose}"


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None
    )


def _span(outcome: Outcome) -> str:
    return f"steps {outcome.step + 1} to {outcome.step + len(outcome.steps)}"
