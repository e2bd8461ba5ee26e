"""The job in which the nodes examine themselves: choose nodes, call srun, collect the answers."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import select
import subprocess
import tempfile
import time
import uuid
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge.doctor.cluster import facts, node_probe
from sqshforge.doctor.cluster.cluster_findings import folded
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.programs import TAIL, Programs, failed
from sqshforge.host.terminal import Reporter

QUESTION = 30.0  # seconds that slurmctld has to answer
CLOCKS = 10.0  # seconds that the nodes have to report their time
ENDING = 15.0  # seconds that srun has to end after its last task
LONGEST = 64 << 10  # most characters of one node's report
IDLE = "idle"
POWERED_DOWN = "idle~"  # as in clouds, where Slurm starts a node when a job needs it
# Runs the probe from its first argument, as srun's input arrives only when all nodes have started.
START = "import base64, sys, zlib; exec(zlib.decompress(base64.b64decode(sys.argv[1])))"
SCRIPT = """\
command -v python3 > /dev/null 2>&1 || {
    echo "MARK ${SLURMD_NODENAME:-$(hostname)} 1/1 {}"
    exit 0
}
exec python3 -I -c "$0" "$@"
"""
LINE = re.compile(
    rf"{node_probe.MARK} (\S{{1,255}}) "
    r"(?:(\d{1,3})/(\d{1,3}) (.{0,1000})|clock (\d{1,15}\.\d{6}))$"
)


@dataclass(frozen=True)
class Plan:
    """Which nodes to examine: `names`, or `count` nodes that Slurm chooses."""

    count: int
    partition: str = ""
    is_asked: bool = False  # whether an option, or a variable that sbatch ignores, named partition
    names: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)  # state by name of nodes left out
    inside: bool = False  # within a job, whose nodes these are
    overlap: bool = False  # a step needs --overlap to share the nodes, from Slurm 20.11 on


@dataclass
class Answers:
    """The nodes' answers so far; if `names` is not empty, other nodes are ignored."""

    names: Collection[str] = ()
    pieces: dict[str, dict[int, str]] = field(default_factory=dict)
    nodes: dict[str, facts.Node] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    asked_at: float = math.inf
    errors: list[str] = field(default_factory=list)  # of srun and Slurm

    def take(self, line: bytes, arrived: float) -> None:
        """Take a line of srun's output; lines that are not a node's are ignored."""
        found = LINE.search(line.decode(errors="replace").rstrip("\r\n"))
        if found is None:
            return
        name, number, count, piece, clock = found.groups()
        if self.names and name not in self.names:
            return
        if clock:
            if self.asked_at <= arrived:
                # The clock was read at some time between the question and the answer's arrival.
                self.clocks[name] = (float(clock) - arrived, float(clock) - self.asked_at)
            return
        pieces = self.pieces.setdefault(name, {})
        pieces[int(number)] = piece
        if len(pieces) == int(count) and sum(map(len, pieces.values())) <= LONGEST:
            with contextlib.suppress(ValueError, RecursionError):
                whole = "".join(pieces[one] for one in sorted(pieces))
                self.nodes[name] = facts.node(json.loads(whole), name)


def plan(nodes: int | None, partition: str, programs: Programs) -> Plan:
    """Choose idle nodes of a partition, all or as many as asked; within a job, its own nodes.

    Raises `MissingError` if Slurm is not installed, does not answer, or has no idle node;
    `RequestError` for a partition that does not exist, or more nodes than it has.
    """
    if programs.which("srun") is None or programs.which("sinfo") is None:
        raise MissingError(
            "srun and sinfo are not on this machine: Slurm's nodes are looked at from where jobs "
            "are submitted",
            fix="run this on a login node of the cluster, or leave --cluster out",
        )
    if os.environ.get("SLURM_JOB_ID") and os.environ.get("SLURM_JOB_NODELIST"):
        return _of_the_job(nodes, partition, programs)
    states = _partitions(programs)
    asked = partition or os.environ.get("SLURM_PARTITION", "")
    chosen = asked or states.default
    if chosen not in states.nodes:
        raise RequestError(
            f"there is no partition {chosen!r}" if chosen else "no partition is the default one",
            fix=f"--partition, one of {', '.join(states.nodes)}",
        )
    there = states.nodes[chosen]
    idle = [name for name, state in there.items() if state == IDLE]
    if nodes is not None and nodes > len(there):
        raise RequestError(
            f"partition {chosen} has {len(there)} nodes, not {nodes}", fix=f"--nodes={len(there)}"
        )
    powered_down = [name for name, state in there.items() if state == POWERED_DOWN]
    if not idle and nodes is None and powered_down:
        raise MissingError(
            f"no node of partition {chosen} is idle; powered down: {folded(powered_down)}",
            fix=f"--nodes=N --timeout=600 has Slurm start N of them (at most {len(powered_down)})",
        )
    if not idle and nodes is None:
        raise MissingError(
            f"no node of partition {chosen} is idle",
            where=", ".join(f"{name}: {state}" for name, state in there.items()),
            fix="--nodes=N waits for N nodes, for --timeout seconds",
        )
    named = tuple(idle[:nodes]) if nodes is None or nodes <= len(idle) else ()
    others = {name: state for name, state in there.items() if named and name not in named}
    return Plan(nodes or len(idle), chosen, bool(asked), named, others)


def _of_the_job(nodes: int | None, partition: str, programs: Programs) -> Plan:
    names = hostnames(os.environ["SLURM_JOB_NODELIST"], programs)
    if partition:
        raise RequestError("within a job its own nodes are looked at", fix="leave --partition out")
    if nodes is not None and nodes > len(names):
        raise RequestError(f"this job has {len(names)} nodes, not {nodes}", fix="leave --nodes out")
    chosen = tuple(names[:nodes])
    others = {name: "not asked for" for name in names if name not in chosen}
    known = programs.attempt(["srun", "--help"], timeout=QUESTION).out
    overlap = "--overlap" in known
    return Plan(len(chosen), names=chosen, others=others, inside=True, overlap=overlap)


@dataclass(frozen=True)
class _States:
    nodes: Mapping[str, Mapping[str, str]]  # state by name, by partition
    default: str


def _partitions(programs: Programs) -> _States:
    words = ["sinfo", "--noheader", "--Node", "--all", "--format=%N %P %t"]
    asked = programs.attempt(words, timeout=QUESTION)
    if asked.code != 0:
        raise MissingError(
            f"Slurm does not answer: {_last(asked.err)}",
            where="sinfo",
            fix="`scontrol ping` says whether slurmctld is there",
        )
    nodes: dict[str, dict[str, str]] = {}
    default = ""
    for line in asked.out.splitlines():
        name, partition, state = [*line.split(), "", "", ""][:3]
        if partition.endswith("*"):
            partition = default = partition[:-1]
        if state:
            nodes.setdefault(partition, {})[name] = state
    return _States(nodes, default)


def hostnames(listed: str, programs: Programs) -> list[str]:
    """Expand names from Slurm's notation."""
    words = ["scontrol", "show", "hostnames", listed]
    return programs.attempt(words, timeout=QUESTION).out.split() if listed else []


def srun(
    plan: Plan, name: str, seconds: float, markers: Sequence[Path], image: Path | None
) -> list[str]:
    """Return the srun command that runs the probe on each node; it includes the probe itself."""
    asked = {"markers": list(map(str, markers)), "image": str(image or ""), "seconds": seconds}
    words = ["srun", f"--job-name={name}", f"--nodes={plan.count}", f"--ntasks={plan.count}"]
    words += ["--ntasks-per-node=1", "--cpus-per-task=1", "--mpi=none", "--chdir=/"]
    words += ["--input=all", "--output=all", "--error=all", "--wait=0", "--kill-on-bad-exit=0"]
    words += [f"--nodelist={folded(plan.names)}"] if plan.names else []
    if plan.inside:
        words += ["--overlap"] if plan.overlap else []
        words += ["--cpu-bind=none"]  # a shell started by srun passes its own binding on
    else:
        words += [f"--partition={plan.partition}", f"--time={math.ceil(seconds / 60) + 1}"]
        # If this process is killed, its job does not wait in the queue for long.
        words += [f"--immediate={math.ceil(seconds) + 30}"]
    script = SCRIPT.replace("MARK", node_probe.MARK)
    probe = base64.b64encode(zlib.compress(Path(node_probe.__file__).read_bytes(), 9)).decode()
    return [*words, "sh", "-c", script, START, probe, json.dumps(asked)]


def ask(
    plan: Plan,
    markers: Sequence[Path],
    image: Path | None,
    seconds: float,
    programs: Programs,
    reporter: Reporter,
) -> Answers:
    """Run the job to its end, for at most `seconds`; it never leaves a job behind.

    Raises `WorkError` with Slurm's messages if no node answers; if only some do not, the caller
    reports them.
    """
    name = f"{node_probe.MARK}-{uuid.uuid4().hex[:12]}"
    words = srun(plan, name, seconds, markers, image)
    answers = Answers(plan.names)
    pipe = subprocess.PIPE
    asked = folded(plan.names) or f"{plan.count} nodes"
    with (
        tempfile.TemporaryFile() as errors,
        programs.start(words, stdin=pipe, stdout=pipe, stderr=errors) as process,
        _cancelled(name, process, programs),
    ):
        output, deadline = _Output(process), time.monotonic() + seconds
        with reporter.track(f"asking {asked}", plan.count, "nodes") as tracker:
            for line, arrived in output.until(deadline):
                answers.take(line, arrived)
                tracker.set(len(answers.nodes))
                if len(answers.nodes) == plan.count:
                    break
        awaited = {one.node for one in answers.nodes.values() if one.python}
        answers.asked_at = time.time()
        _send(process, b"clock\n")
        for line, arrived in output.until(time.monotonic() + CLOCKS if awaited else 0):
            answers.take(line, arrived)
            if awaited <= answers.clocks.keys():
                break
        state = "" if answers.nodes else _state(name, programs)
        _send(process, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING if len(answers.nodes) == plan.count else 0)
        code = process.poll()
        errors.seek(0)
        answers.errors = errors.read(LONGEST).decode(errors="replace").splitlines()
    if not answers.nodes and code:
        raise failed([*words[:-5], "..."], code, answers.errors)
    if not answers.nodes:
        said = "".join(f"\n    {line}" for line in answers.errors[-TAIL:])
        raise WorkError(
            f"none of {asked} has answered within {seconds:.0f} s{state}{said}",
            fix="--timeout=SECONDS waits longer; `squeue` and `sinfo -R` tell what holds it up",
        )
    return answers


@contextlib.contextmanager
def _cancelled(name: str, process: subprocess.Popen[bytes], programs: Programs) -> Iterator[None]:
    """Cancel the job, by its unique name, if the block ends before srun has ended."""
    try:
        yield
    finally:
        if process.poll() is None:
            programs.attempt(["scancel", "--quiet", f"--name={name}"], timeout=QUESTION)


def _send(process: subprocess.Popen[bytes], text: bytes | None) -> None:
    """Write to the input of all tasks, or close it for None. srun may have ended."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        if text is None:
            process.stdin.close()
        else:
            process.stdin.write(text)
            process.stdin.flush()


class _Output:
    """The lines of srun's output, each with its arrival time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._rest = b""
        self._come: deque[tuple[bytes, float]] = deque()

    def until(self, deadline: float) -> Iterator[tuple[bytes, float]]:
        """Yield the lines that arrive before a deadline (of the monotonic clock) or srun's end."""
        while True:
            while self._come:
                yield self._come.popleft()
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self._descriptor], [], [], wait)[0]:
                return
            piece = os.read(self._descriptor, LONGEST)
            if not piece:
                return
            arrived = time.time()
            *whole, rest = (self._rest + piece).split(b"\n")
            self._rest = rest[-LONGEST:]
            self._come.extend((line, arrived) for line in whole)


def _state(name: str, programs: Programs) -> str:
    """Return the job's state, reason and nodes, in Slurm's words."""
    words = ["squeue", "--noheader", f"--name={name}", "--format=%T, %r %N"]
    said = programs.attempt(words, timeout=QUESTION).out.strip()
    return f": the job is {said}" if said else ""


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
