"""Node 0's part: collect reports, have nodes check each other and compute together, and judge."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from training.job.plan import Job
from training.job.preflight import fault_isolation
from training.job.preflight.checks_network import SEEN_WITHIN
from training.job.preflight.fault_isolation import Pair, further_pairs, ring_rounds, tree_levels
from training.job.preflight.finding import Fault, Report
from training.job.preflight.protocol import Hub
from training.job.preflight.rendezvous import Rendezvous
from training.job.preflight.settings import NodeNames, Settings

WIDTH = 32
"""Nodes of a gloo group, in which each node connects to every other."""

GRACE = 10.0
"""Seconds for a short answer of a node that is present."""

CHECKS = (
    "node",
    "driver",
    "devices",
    "efa",
    "folder",
    "space",
    "clock",
    "versions",
    "inside",
    "across",
)
"""All checks, in the order of the table."""


class Coordinator:
    """Leads the checks of all nodes, and ends by telling each node what concerns it."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        names: NodeNames,
        clock: Callable[[], float],
        nonce: str,
        port: int,
    ) -> None:
        """Open the hub at `port`. Raises OSError if it is taken."""
        self._job, self._settings, self._names, self._clock = job, settings, names, clock
        self._began = time.monotonic()
        self._hub = Hub(port, job.run_id, job.nodes, {"nonce": nonce})
        self._rendezvous = Rendezvous() if job.nodes > 1 else None
        self._reports: dict[int, Report] = {}
        self._faults: list[Fault] = []
        self._rows: list[TableRow] = []
        self._store: list[str | int] = []  # where workers meet: address and port
        self.port = self._hub.port

    def run(self) -> None:
        """Lead the checks to the end. Participants, this node's included, raise what is wrong."""
        try:
            self._hear()
            self._look()
            self._compare_clocks()
            self._faults += fault_isolation.version_faults(
                list(self._reports.values()), self._names
            )
            self._compute()
            self._send_home()
        finally:
            self._hub.close()
            if self._rendezvous is not None:
                self._rendezvous.close()

    def _hear(self) -> None:
        """Collect the reports; a node that does not connect, or leaves, is at fault."""
        everyone = range(self._job.nodes)
        limit = self._settings.limit
        answers = self._hub.gather(everyone, limit)
        # A node that connected late has as long for its checks as the others.
        answers |= self._hub.gather(self._hub.came - answers.keys(), limit)
        for rank, answer in sorted(answers.items()):
            try:
                report = Report.unpack(answer.value["report"])
            except (KeyError, TypeError):
                text = "its report cannot be read: it runs another version of training/"
                self._faults.append(Fault("versions", rank, text))
                continue
            self._reports[rank] = report
            self._names.learn(rank, report.name)
        for rank in set(everyone) - answers.keys():
            if rank in self._hub.lost:
                text = "it came, and has ended during its own checks"
            elif rank in self._hub.came:
                text = f"it came, and its own checks have not ended within {limit:g} s"
            else:
                text = f"it has not come within {limit:g} s"
            self._faults.append(Fault("node", rank, text))
        summary = f"{len(answers)} of {self._job.nodes} have joined"
        self._rows.append(TableRow("node", time.monotonic() - self._began, summary))
        self._rows += report_rows(list(self._reports.values()))
        self._faults += fault_isolation.own_faults(self._reports.values())

    def _look(self) -> None:
        """Have nodes read each other's files: each those of node 0 and the next node, node 0 all.

        That shows that all use one folder, and n nodes open only 3 n files.
        """
        nodes = [rank for rank, report in self._reports.items() if report.wrote]
        if len(nodes) < 2:
            return
        began = time.monotonic()
        first, *others = nodes
        asked = {
            rank: sorted({first, nodes[(index + 1) % len(nodes)]} - {rank})
            for index, rank in enumerate(nodes)
        }
        asked[first] = others
        answers = self._ask({r: {"do": "look", "ranks": a} for r, a in asked.items()}, SEEN_WITHIN)
        seen: dict[Pair, bool] = {}
        for rank, ranks in asked.items():
            unseen = answers[rank]["unseen"] if rank in answers else ranks
            for other in ranks:
                pair = (min(rank, other), max(rank, other))
                seen[pair] = seen.get(pair, True) and other not in unseen
        self._faults += fault_isolation.folder_faults(nodes, seen, self._names)
        self._add_seconds("folder", time.monotonic() - began)

    def _compare_clocks(self) -> None:
        """Ask every clock; its time was read at some moment between question and answer."""
        began, asked = time.monotonic(), self._clock()
        self._hub.ask({rank: {"do": "clock"} for rank in self._reports})
        offsets = {}
        for rank, answer in self._hub.gather(self._reports, GRACE).items():
            half = (answer.at - began) / 2
            offsets[rank] = (float(answer.value["clock"]) - asked - half, half)
        self._faults += fault_isolation.clock_faults(offsets, self._names)
        most = max((abs(ahead) for ahead, _ in offsets.values()), default=0.0)
        self._rows.append(TableRow("clock", time.monotonic() - began, f"within {most:.2f} s"))

    def _compute(self) -> None:
        """Have all nodes that can compute together do so; if they fail, find the cause."""
        backends = Counter(report.backend for report in self._reports.values() if report.backend)
        backend = backends.most_common(1)[0][0] if backends else ""
        nodes = [rank for rank, report in self._reports.items() if report.backend == backend]
        if not backend or len(nodes) < 2:
            summary = "one node alone" if self._job.nodes == 1 else "not tried"
            self._rows.append(TableRow("across", 0.0, summary))
            return
        began = time.monotonic()
        try:
            self._store = [self._job.address, self._rendezvous_port()]
        except OSError as error:
            self._faults.append(Fault("across", 0, str(error)))
            self._rows.append(TableRow("across", time.monotonic() - began, "not tried"))
            return
        self._faults += self._find(nodes, len(nodes) if backend == "nccl" else WIDTH)
        summary = f"{backend}, {sum(self._reports[rank].processes for rank in nodes)} processes"
        self._rows.append(TableRow("across", time.monotonic() - began, summary))

    def _find(self, nodes: Sequence[int], width: int) -> list[Fault]:
        """Have all nodes compute together; if groups fail, try pairs to find the nodes at fault."""
        for number, groups in enumerate(tree_levels(nodes, width)):
            reasons = self._reduce(groups, f"all-{number}", self._settings.limit)
            failed = [group for group in groups if any(reasons[rank] for rank in group)]
            if failed:
                return self._isolate(failed, reasons)
        return []

    def _isolate(self, groups: Sequence[Sequence[int]], reasons: dict[int, str]) -> list[Fault]:
        """Try neighbors in the groups that have failed, then the pairs that tell more."""
        tried: dict[Pair, bool] = {}

        def try_(pairs: list[Pair], name: str) -> None:
            # Workers that hung start anew and load torch before the time of the pairs begins.
            ranks = [rank for pair in pairs for rank in pair]
            self._ask({rank: {"do": "ready"} for rank in ranks}, self._settings.limit)
            answers = self._reduce([list(pair) for pair in pairs], name, self._settings.pair_limit)
            reasons.update({rank: reason for rank, reason in answers.items() if reason})
            tried.update({pair: not any(answers[rank] for rank in pair) for pair in pairs})

        rounds = zip_longest(*(ring_rounds(group) for group in groups), fillvalue=[])
        for number, parts in enumerate(rounds):
            try_([pair for part in parts for pair in part], f"pair-{number}")
        known = [_among(group, tried) for group in groups]
        more = [
            pair
            for group, own in zip(groups, known, strict=True)
            for pair in further_pairs(group, own)
        ]
        if more:
            try_(more, "further")
        return [
            fault
            for group in groups
            for fault in fault_isolation.network_faults(
                group, _among(group, tried), reasons, self._names
            )
        ]

    def _reduce(self, groups: Sequence[Sequence[int]], name: str, seconds: float) -> dict[int, str]:
        """Have each group compute a known sum; return each node's error by rank, empty if none."""
        messages = {}
        for group in groups:
            first = 0
            world = sum(self._reports[rank].processes for rank in group)
            for rank in group:
                messages[rank] = {
                    "do": "reduce",
                    "name": f"{name}-{group[0]}-{group[-1]}",
                    "store": self._store,
                    "first": first,
                    "world": world,
                    "processes": self._reports[rank].processes,
                    "seconds": seconds,
                }
                first += self._reports[rank].processes
        answers = self._ask(messages, seconds)
        return {
            rank: answers[rank]["fault"] if rank in answers else "the node gives no answer"
            for rank in messages
        }

    def _ask(
        self, messages: dict[int, dict[str, Any]], seconds: float
    ) -> dict[int, dict[str, Any]]:
        self._hub.ask(messages)
        answers = self._hub.gather(messages, seconds + GRACE)
        return {rank: answer.value for rank, answer in answers.items()}

    def _send_home(self) -> None:
        """Tell every node the outcome; the first good one writes down the bad ones."""
        for rank in self._hub.lost & self._reports.keys():
            self._faults.append(Fault("node", rank, "it has ended during the checks"))
        bad = sorted({fault.rank for fault in self._faults if fault.rank is not None})
        hosts = [self._names.host(rank) for rank in bad]
        writer = next((rank for rank in self._reports if rank not in bad), 0)
        seconds = time.monotonic() - self._began
        messages: dict[int, dict[str, Any]] = {}
        for rank in self._hub.came - self._hub.lost:
            own = [fault for fault in self._faults if fault.rank == rank]
            messages[rank] = {
                "do": "end",
                "faults": len(self._faults),
                "wrong": fault_lines(self._faults if rank == 0 else own, self._names),
                "bad": [self._names[one] for one in bad],
                "hosts": [host for host in hosts if host] if rank == writer else None,
            }
        if 0 in messages:
            lines = format_table(self._job.nodes, seconds, self._rows, self._faults)
            messages[0]["table"] = lines
        self._ask(messages, 0)

    def _rendezvous_port(self) -> int:
        """The port of the store. Raises OSError if the store could not be opened."""
        assert self._rendezvous is not None
        return self._rendezvous.port(self._settings.limit)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self._rows = [
            TableRow(row.check, row.seconds + seconds, row.summary) if row.check == name else row
            for row in self._rows
        ]


def _among(group: Sequence[int], pairs: Mapping[Pair, bool]) -> dict[Pair, bool]:
    """Select the pairs that belong to a group."""
    return {pair: well for pair, well in pairs.items() if pair[0] in group}


@dataclass(frozen=True)
class TableRow:
    """One check's result over all nodes."""

    check: str
    seconds: float  # of the slowest node
    summary: str


def report_rows(reports: Sequence[Report]) -> list[TableRow]:
    """Summarize the nodes' own checks by what most nodes found."""
    found = []
    for name in CHECKS:
        own = [one for report in reports for one in report.findings if one.check == name]
        if own:
            summary, _ = Counter(one.summary for one in own).most_common(1)[0]
            found.append(TableRow(name, max(one.seconds for one in own), summary))
    return found


def format_table(
    nodes: int, seconds: float, lines: Iterable[TableRow], faults: Sequence[Fault]
) -> str:
    """Format the result of every check, in the order of CHECKS."""
    bad = {fault.check for fault in faults}
    ordered = sorted(lines, key=lambda row: CHECKS.index(row.check))
    found = []
    for row in ordered:
        word = "BAD" if row.check in bad else "ok"
        found.append(f"  {row.check:8}  {word:3}  {row.seconds:5.1f} s  {row.summary}".rstrip())
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    return "\n".join([f"training.preflight: {count}, {seconds:.1f} s", *found])


def fault_lines(faults: Iterable[Fault], names: NodeNames) -> list[str]:
    """Format the faults, a line each, in the order of the nodes."""
    ordered = sorted(faults, key=lambda one: (one.rank is None, one.rank or 0))
    return [f"{_whose(fault, names)}{fault.check}: {fault.text}" for fault in ordered]


def _whose(fault: Fault, names: NodeNames) -> str:
    return "" if fault.rank is None else f"{names[fault.rank]}: "
