"""Judge the nodes of a cluster together, and Slurm's configuration."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqshforge.doctor.cluster.facts import Image, Node
from sqshforge.doctor.cluster.node_findings import (
    ENROOT,
    OWN,
    PYXIS,
    RUNTIME,
    Asked,
    Seen,
    findings,
    runtime,
)
from sqshforge.doctor.finding import Finding
from sqshforge.host.terminal import duration, human

HERE = "this machine"
CLOCK = 5.0  # seconds that clocks may differ, as in preflight
KILL_WAIT = 30  # seconds, Slurm's default
# Findings that must be the same on all nodes: differences are reported even if each is fine.
ALIKE = ("enroot", "pyxis", "unsquashfs", "NVIDIA GPUs", "nvidia-container-cli", "EFA", "fi_info")
ORDER = (PYXIS, ENROOT, OWN)

Bounds = tuple[float, float]  # least and most seconds that a clock may be ahead


@dataclass(frozen=True)
class Row:
    """A finding, and the nodes that it applies to; none if it is about Slurm."""

    finding: Finding
    nodes: tuple[str, ...] = ()

    def lines(self, width: int) -> list[str]:
        """Return it as text, with the nodes in a column of this width."""
        where = folded(self.nodes) if self.nodes else "slurm"
        return replace(self.finding, what=f"{where:{width}}  {self.finding.what}").lines()


def rows(nodes: Sequence[Node], asked: Asked, clocks: Mapping[str, Bounds]) -> list[Row]:
    """Return all findings, in the order of the checks; nodes that agree share a row."""
    asked = replace(asked, head=asked.head or _usual_image(nodes))
    seen = [(node.node, one) for node in nodes for one in findings(node, asked)]
    awake = [node.node for node in nodes if node.python]
    return [*_runtimes(nodes), *_alike(_shared(seen)), *_clocks(clocks, awake)]


def folded(names: Iterable[str]) -> str:
    """Fold names into Slurm's notation: n[1-2,4],head."""
    groups: dict[tuple[str, int], list[str]] = {}
    listed = list(dict.fromkeys(names))
    ends = [re.fullmatch(r"(.*?)(\d{1,15})", name) for name in listed]
    padded = {end[1] for end in ends if end and len(end[2]) > 1 and end[2].startswith("0")}
    for name, end in zip(listed, ends, strict=True):
        if end is None:
            groups[(name, -1)] = []
        else:
            width = len(end[2]) if end[1] in padded else 0
            groups.setdefault((end[1], width), []).append(end[2])
    return ",".join(
        prefix + (_ranges(numbers, width) if numbers else "")
        for (prefix, width), numbers in groups.items()
    )


def _ranges(numbers: Sequence[str], width: int) -> str:
    if len(numbers) == 1:
        return numbers[0]
    parts = []
    # In a run of consecutive numbers, each differs from its index by the same amount.
    ordered = sorted(map(int, numbers))
    for _, run in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = f"{members[0]:0{width}d}", f"{members[-1]:0{width}d}"
        parts.append(first if first == last else f"{first}-{last}")
    return f"[{','.join(parts)}]"


def _shared(seen: Iterable[tuple[str, Seen]]) -> list[Row]:
    """Merge equal findings of nodes into one row, with the worst of the nodes' own figures."""
    order: list[str] = []
    grouped: dict[Finding, list[tuple[str, Seen]]] = {}
    for name, members in itertools.groupby(seen, lambda pair: pair[0]):
        place = -1
        for _, one in members:
            # A finding that no earlier node had goes after the one that it follows here.
            if one.finding.what not in order:
                order.insert(place + 1, one.finding.what)
            place = order.index(one.finding.what)
            grouped.setdefault(one.finding, []).append((name, one))
    found = []
    for finding, alike in grouped.items():
        detail = finding.detail
        free = [one.free for _, one in alike if one.free is not None]
        seconds = [one.seconds for _, one in alike if one.seconds is not None]
        if free:
            least = "at least " if human(min(free)) != human(max(free)) else ""
            detail += f", {least}{human(min(free))} free"
        if seconds:
            most = "at most " if len(seconds) > 1 else ""
            detail += f" in {most}{_seconds(max(seconds))}"
        found.append(Row(replace(finding, detail=detail), tuple(name for name, _ in alike)))
    return sorted(found, key=lambda row: order.index(row.finding.what))


def _seconds(count: float) -> str:
    return duration(count) if count >= 1 else f"{count:.2f} s"


def _alike(found: Sequence[Row]) -> Iterator[Row]:
    """Mark findings that are fine by themselves but differ from those of most nodes."""
    for row in found:
        what = row.finding.what
        same = [one for one in found if one.finding.what == what and one.finding.ok]
        if not row.finding.ok or len(same) < 2 or not what.startswith(ALIKE):
            yield row
            continue
        most = max(len(one.nodes) for one in same)
        usual = [one for one in same if len(one.nodes) == most]
        if usual == [row]:
            yield row
            continue
        other = next(one for one in usual if one is not row)
        detail = f"{row.finding.detail}; not as on {folded(other.nodes)}"
        fix = "the same on all nodes of a partition"
        yield Row(Finding(what, False, detail, fix, needed=False), row.nodes)


def _runtimes(nodes: Sequence[Node]) -> Iterator[Row]:
    """Report which runtime starts images: the first node of a job chooses for all its nodes."""
    chosen: dict[str, list[str]] = {}
    for node in nodes:
        if node.python and not node.fault("pyxis") and not node.fault("enroot"):
            chosen.setdefault(runtime(node), []).append(node.node)
    best = next((one for one in ORDER if one in chosen), OWN)
    for way in sorted(chosen, key=ORDER.index):
        detail = f"launchers take {way}" + (" (sqshforge-run.pyz)" if way == OWN else "")
        if way != best:
            detail += f", but {best} where the first node of a job is of {folded(chosen[best])}"
        fix = f"install {best} there as well; till then sbatch --exclude={folded(chosen[way])}"
        yield Row(Finding(RUNTIME, way == best, detail, fix), tuple(chosen[way]))


def _usual_image(nodes: Sequence[Node]) -> Image | None:
    """Return the beginning of the image that most nodes have read."""
    read = Counter(
        (one.image.size, one.image.read, one.image.digest) for one in nodes if one.image.read
    )
    if not read:
        return None
    (size, length, digest), _ = read.most_common(1)[0]
    return Image(size=size, read=length, digest=digest)


def _clocks(clocks: Mapping[str, Bounds], nodes: Sequence[str]) -> Iterator[Row]:
    """Report clocks that are off from what most agree on; this machine's is one of them.

    A clock is read over Slurm's connections, so its offset is only known within bounds; it counts
    as off only if the whole interval is.
    """
    silent = tuple(name for name in nodes if name not in clocks)
    if silent:
        fix = "ask again: a node of the job did not answer, or the machine is very busy"
        yield Row(Finding("clock", False, "not known", fix, needed=False), silent)
    bounds = {HERE: (0.0, 0.0), **clocks}
    middles = {round((low + high) / 2) for low, high in bounds.values()}
    right = max([0, *middles], key=lambda at: sum(_off(one, at) == 0 for one in bounds.values()))
    apart = {name: _off(one, right) for name, one in bounds.items()}
    fine = tuple(name for name in clocks if not apart[name])
    if fine:
        whole = max(abs(bound - right) for name in fine for bound in bounds[name])
        yield Row(Finding("clock", True, f"the same, known to {_seconds(whole)}"), fine)
    for name, seconds in apart.items():
        if seconds:
            way = "ahead of" if seconds > 0 else "behind"
            detail = f"{_seconds(abs(seconds))} {way} the others"
            fix = "a time server: chrony or systemd-timesyncd; munge refuses 5 minutes"
            yield Row(Finding("clock", False, detail, fix), (name,))


def _off(bounds: Bounds, right: float) -> float:
    """Return how many seconds a clock is at least ahead, or behind (< 0); 0 if it may be right."""
    low, high = bounds[0] - right, bounds[1] - right
    return low if low > CLOCK else high if high < -CLOCK else 0.0


def pairs(text: str) -> dict[str, str]:
    """Parse the output of `scontrol show config`, which has a setting per line."""
    lines = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


def slurm(config: Mapping[str, str], graced: Sequence[str]) -> Iterator[Row]:
    """Judge how jobs are preempted and cancelled; `graced` are those with a GraceTime."""
    wait = re.match(r"\d{1,6}", config.get("KillWait", ""))
    if wait is not None:
        seconds = int(wait[0])
        detail = f"{seconds} s between SIGTERM and SIGKILL, in which a cancelled job can save"
        fix = f"KillWait={KILL_WAIT} or more in slurm.conf"
        yield Row(Finding("KillWait", seconds >= KILL_WAIT, detail, fix, needed=False))
    if config.get("PreemptType", "preempt/none") in ("preempt/none", "(null)"):
        yield Row(Finding("preemption", True, "off"))
        return
    if not graced:
        yield Row(Finding("preemption", True, "on, without GraceTime: what KillWait gives"))
        return
    # The option moved from one list to the other; a Slurm that shows the newer list has it there.
    newer, older = "send_user_signal", "preempt_send_user_signal"
    sends = newer in config.get("PreemptParameters", "").split(",")
    sends = sends or older in config.get("SlurmctldParameters", "").split(",")
    where = ", ".join(graced)
    detail = f"on, with GraceTime ({where}); " + (
        "the signal that a job asked for comes first"
        if sends
        else "SIGTERM goes to every process at once, not the signal that a job asked for"
    )
    has_newer = "PreemptParameters" in config
    fix = f"PreemptParameters={newer}" if has_newer else f"SlurmctldParameters={older}"
    yield Row(Finding("preemption", sends, detail, f"{fix} in slurm.conf", needed=False))


def graced(partitions: str, qualities: str) -> list[str]:
    """Return the partitions and QOS with a GraceTime, from scontrol's and sacctmgr's output."""
    found = []
    for line in partitions.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if words.get("GraceTime", "0") != "0" and words.get("PreemptMode") != "OFF":
            found.append(f"partition {words.get('PartitionName', '?')}")
    for line in qualities.splitlines():
        name, _, grace = line.partition("|")
        if re.search(r"[1-9]", grace):
            found.append(f"QOS {name}")
    return found
