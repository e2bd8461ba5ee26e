"""A node's part of a job, decided by pure functions from what Slurm and the node say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.errors import RequestError
from training.job import fabric
from training.job.accelerators import (
    VISIBLE_CORES,
    Usable,
    choose_accelerators,
    count_efa_cards,
    describe_machine,
)
from training.job.machine import ulimits
from training.job.machine.devices import format_cores, share_cores
from training.job.machine.ulimits import Limit
from training.job.node import Job, Node
from training.job.nsys import Nsys
from training.job.rank import CORES, NSYS
from training.job.rendezvous import C10D, Rendezvous, choose_rendezvous, require_descriptors
from training.job.types import GIVEN, Decision, count
from training.parallel.neuron.environment import COMPILER

PORTS = 61000, 4536  # the first, and how many: above the kernel's range for outgoing connections
# Ranks from which gloo takes over ten seconds to join all (docs/background/scale/meeting.md).
MANY = 512
NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")  # the first set counts
NUMBERS = ("NPROC_PER_NODE", "GPUS_PER_NODE")
SHIM = "training.job.rank"
RESTARTS = "RESTARTS"
SPARES = "SPARES"
SHRINK = "SHRINK"
BIND = "NUMA_BIND"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a node needs to start its processes."""

    job: Job
    rendezvous: Rendezvous
    machine: tuple[Decision, ...]  # what the node is
    processes: int  # on this node
    processes_why: str
    local_address: str
    variables: tuple[Decision, ...]  # for the processes
    limits: tuple[Limit, ...]  # to raise for them
    cores: tuple[tuple[int, ...], ...]  # of each process; empty: they are not bound
    nsys: Nsys | None
    warnings: tuple[str, ...]
    module: str
    flags: tuple[str, ...]
    restarts: int = 0  # in place, that the processes may have in this start of the job

    @property
    def endpoint(self) -> str:
        return f"{self.job.address}:{self.job.port}"

    @property
    def shim(self) -> dict[str, str]:
        """The variables for training.job.rank; empty if it has nothing to do."""
        found = {}
        if self.cores:
            found[CORES] = json.dumps(self.cores)
        if self.nsys:
            found[NSYS] = json.dumps({"ranks": self.nsys.ranks, "words": self.nsys.words})
        return found

    @property
    def torchrun(self) -> tuple[str, ...]:
        """Torchrun's arguments."""
        return (*self._options, *self.flags)

    @property
    def _options(self) -> tuple[str, ...]:
        return (
            f"--nnodes={self.job.training}",
            f"--nproc-per-node={self.processes}",
            f"--rdzv-id={self.job.run_id}",
            *self.rendezvous.options(self.job, self.endpoint),
            f"--local-addr={self.local_address}",
            f"--max-restarts={self.restarts}",
            "--monitor-interval=0.5",
            "-m",
            *((SHIM,) if self.shim else ()),
            self.module,
        )

    @property
    def _restarting(self) -> tuple[Decision, ...]:
        found = []
        if self.restarts:
            found.append(
                Decision(RESTARTS, str(self.restarts), "of failed processes, in this container")
            )
        if self.job.spares:
            why = f"of {self.job.nodes} nodes, that wait until one of the others is lost"
            found.append(Decision(SPARES, str(self.job.spares), why))
        if self.job.shrink:
            why = "where no spare is left, fewer nodes go on without a lost one"
            found.append(Decision(SHRINK, "1", why))
        return tuple(found)

    @property
    def title(self) -> str:
        return f"node {self.job.node_rank} of {self.job.nodes}: {count(self.processes, 'process')}"

    def block(self) -> str:
        """Describe every decision with its reason."""
        first = "hosted here" if self.job.node_rank == 0 else "hosted by node 0"
        reasons = (f"{first}, as {self.job.run_id}", self.rendezvous.why)
        decisions = (
            *self.machine,
            Decision("NPROC_PER_NODE", str(self.processes), self.processes_why),
            Decision("rendezvous", self.endpoint, "; ".join(filter(None, reasons))),
            Decision("local address", self.local_address, "as the other nodes reach this one"),
            *self.variables,
            *self._restarting,
            *(self.nsys.decisions() if self.nsys else ()),
        )
        width = max(len(one.name) for one in decisions)
        span = max(len(one.value) for one in decisions)
        lines = [f"  {one.name:{width}}  {one.value:{span}}  {one.why}" for one in decisions]
        command = shlex.join(("torchrun", *self._options, *_last_of_each(self.flags)))
        return "\n".join([f"training.launch: {self.title}", *lines, f"  {command}"])


def _last_of_each(flags: Sequence[str]) -> list[str]:
    """The flags that count: of a --NAME=VALUE that is given more than once, the last."""
    last = {flag.partition("=")[0]: number for number, flag in enumerate(flags)}
    return [
        flag
        for number, flag in enumerate(flags)
        if not flag.startswith("--") or "=" not in flag or last[flag.partition("=")[0]] == number
    ]


def read_job(environment: Mapping[str, str]) -> Job:
    """Read Slurm's variables. Raises RequestError for values that no job can have."""
    id = environment.get("SLURM_JOB_ID", "")
    launched = environment.get("NODES", "").split()  # as the launcher lists them
    if not id:
        _require_all(1, launched)
        _spares(environment, 1)
        _shrinks(environment, 1)
        return Job(
            id="local",
            address=environment.get("MASTER_ADDR") or Job.address,
            port=_port(environment, 1, 0),
        )
    if _whole(environment, "SLURM_LOCALID", 0):
        raise RequestError(
            "training.launch starts a node's processes itself; fix: --ntasks-per-node=1"
        )
    nodes = next((_whole(environment, name, 1) for name in NODES if environment.get(name)), 1)
    _require_all(nodes, launched)
    if nodes > 1 and not environment.get("MASTER_ADDR"):
        raise RequestError(
            "MASTER_ADDR: must be the address of the job's first node; the launchers set it from "
            "`scontrol show hostnames`"
        )
    first, among = PORTS
    port = first + _whole(environment, "SLURM_JOB_ID", 0) % among
    return Job(
        id=id,
        restarts=_whole(environment, "SLURM_RESTART_COUNT", 0),
        node_rank=_whole(environment, "SLURM_NODEID", 0),
        nodes=nodes,
        address=environment.get("MASTER_ADDR") or Job.address,
        port=_port(environment, nodes, port + (port == fabric.NEURON_PORT)),
        spares=_spares(environment, nodes),
        shrink=_shrinks(environment, nodes),
    )


def _port(environment: Mapping[str, str], nodes: int, default: int) -> int:
    """The port of the rendezvous; 0, any free one, only for a single node. Raises RequestError."""
    port, least = _whole(environment, "MASTER_PORT", default), int(nodes > 1)
    if not least <= port <= 65535:
        raise RequestError(f"MASTER_PORT: must be from {least} to 65535, not {port}")
    return port


def _spares(environment: Mapping[str, str], nodes: int) -> int:
    """How many of the nodes are spares. Raises RequestError if node 0 would train alone."""
    spares = _whole(environment, SPARES, 0)
    if spares and nodes - spares < 2:
        raise RequestError(
            f"{SPARES}: {spares} of {count(nodes, 'node')} would wait, and at least two must "
            "train, as the first cannot be replaced; fix: "
            f"--nodes={spares + 2} or more, or fewer {SPARES}"
        )
    return spares


def _shrinks(environment: Mapping[str, str], nodes: int) -> bool:
    """Whether fewer nodes may go on. Raises RequestError if the job has none to lose."""
    shrinks = _switch(environment, SHRINK, "0")
    if shrinks and nodes < 2:
        raise RequestError(
            f"{SHRINK}: {count(nodes, 'node')} cannot become fewer, as the first cannot be lost; "
            f"fix: --nodes=2 or more, or no {SHRINK}"
        )
    return shrinks


def _require_all(nodes: int, launched: Sequence[str]) -> None:
    """Refuse a number of nodes that is not the launcher's: a node would train alone, or wait."""
    if launched and nodes != len(launched):
        raise RequestError(
            f"this container sees a job of {count(nodes, 'node')}, but its launcher has started "
            f"{len(launched)}: SLURM_STEP_NUM_NODES and its like do not reach it; fix: pass them "
            "on to the container (enroot: --env=NAME), or unset NODES",
            local=True,
        )


def make_plan(
    job: Job,
    node: Node,
    environment: Mapping[str, str],
    module: str,
    flags: Sequence[str],
    nproc: int | None = None,
    nsys: Nsys | None = None,
) -> Plan:
    """Decide a node's part of the job; looks only at its arguments. Raises RequestError."""
    usable = choose_accelerators(node, environment)
    cards, warnings = count_efa_cards(node)
    processes, why = _processes(usable, environment, nproc)
    _check_ranks(nsys, job, processes)
    rendezvous = choose_rendezvous(job, environment)
    if job.outlives_nodes and not rendezvous.restarts_in_place:
        name = SPARES if job.spares else SHRINK
        raise RequestError(
            f"{name}: nodes meet again by the rendezvous c10d, and this is {rendezvous.why}; "
            f"fix: leave {name} out, or RENDEZVOUS={C10D}"
        )
    require_descriptors(job, processes, node.limits)
    cores, binding = _cores(node, usable, environment, processes)
    chosen = [
        Decision(
            "OMP_NUM_THREADS",
            str(max(1, node.cores // processes)),
            f"{count(node.cores, 'core')} / {count(processes, 'process')}",
        )
    ]
    if job.id != "local":
        # Ranks that share a cache on a network folder overwrite each other's files.
        folder = f"{environment.get('TMPDIR') or '/tmp'}/triton-{job.run_id}"
        chosen.append(Decision("TRITON_CACHE_DIR", folder, "on this node, of this job alone"))
    if job.nodes > 1 and node.interface:
        # gloo would look up its own host name, which on many machines is a loopback address.
        why_interface = f"the interface of {node.address}"
        chosen.append(Decision("GLOO_SOCKET_IFNAME", node.interface, why_interface))
    if job.nodes > 1:
        # Otherwise each connection warns of the other node's name, which need not resolve.
        quiet = "connections do not complain of nodes that have no name"
        chosen.append(Decision("TORCH_CPP_LOG_LEVEL", "ERROR", quiet))
    ranks = job.training * processes
    if ranks >= MANY:
        # Otherwise each rank tells the store how every other one reaches it: ranks ** 2 requests.
        lazy = f"of {ranks:,} ranks only those are joined that talk to each other"
        chosen.append(Decision("TORCH_GLOO_LAZY_INIT", "1", lazy))
    cables = node.instance.fabric if node.instance else None
    slow = usable.kind == "cuda" and cards > 0 and job.nodes > 1
    warnings += tuple(fabric.plugin_warnings(node.instance, node.software)) if slow else ()
    chosen += fabric.variables(
        fabric.Situation(
            nodes=job.nodes,
            processes=processes,
            gpus=usable.kind == "cuda",
            neuron=usable.kind == "neuron",
            efa=cards > 0,
            rdma=bool(cables and cables.rdma),
            staged=bool(node.instance and node.instance.staged),
            tuned=bool(cables and cables.tuned),
            chosen=bool(environment.get(VISIBLE_CORES)),
            software=node.software,
            cache=_cache(environment, flags),
        )
    )
    return Plan(
        job=job,
        rendezvous=rendezvous,
        machine=(
            *describe_machine(node, cards),
            *ulimits.describe_limits(node.limits, cards > 0),
            *binding,
        ),
        processes=processes,
        processes_why=why,
        local_address=job.address if job.node_rank == 0 else node.address,
        variables=tuple(_given(one, environment) for one in chosen),
        limits=ulimits.limits_to_raise(node.limits, cards > 0),
        cores=tuple(cores),
        nsys=nsys,
        warnings=(*usable.warnings, *warnings, *ulimits.limit_warnings(node.limits, cards > 0)),
        module=module,
        flags=tuple(flags),
        restarts=_whole(environment, RESTARTS, 0) if rendezvous.restarts_in_place else 0,
    )


def _given(one: Decision, environment: Mapping[str, str]) -> Decision:
    """Let a variable of the environment win, unless it is empty."""
    value = environment.get(one.name)
    return Decision(one.name, value, GIVEN) if value else one


def _cores(
    node: Node, usable: Usable, environment: Mapping[str, str], processes: int
) -> tuple[list[tuple[int, ...]], list[Decision]]:
    """Choose each process's cores, if there is anything to choose; return them and why."""
    binds = _switch(environment, BIND, "1")
    if len(node.domains) < 2 or not usable.count:
        return [], []
    if not binds:
        return [], [Decision(BIND, "0", GIVEN)]
    found = share_cores(node.domains, usable.places, processes)
    if not found:
        return [], [Decision(BIND, "0", "it is not known which cores are near to which process's")]
    shown = " ".join(format_cores(one) for one in found)
    return found, [Decision(BIND, "1", f"the cores near to each process's accelerator: {shown}")]


def _cache(environment: Mapping[str, str], flags: Sequence[str]) -> str:
    """Choose a folder for Neuron's compiled graphs; empty leaves it to the flags or the run."""
    named = any(one.partition("=")[0] == "--compile_cache" for one in flags)
    shared = environment.get("CHECKPOINTS")
    if named or not shared or "--cache_dir" in environment.get(COMPILER, ""):
        return ""
    return f"{shared}/neuron_compile_cache"


def _processes(
    usable: Usable, environment: Mapping[str, str], nproc: int | None
) -> tuple[int, str]:
    if nproc is not None:
        number, why = nproc, "--nproc"
    elif name := _given_number(environment):
        number, why = _whole(environment, name, 1), GIVEN
        if name != NUMBERS[0]:
            why = f"{GIVEN}, as {name}"
    else:
        number, why = usable.count or 1, usable.why
    if number < 1:
        raise RequestError(f"NPROC_PER_NODE: must be at least 1, not {number}")
    return number, why


def _given_number(environment: Mapping[str, str]) -> str:
    """Name the variable that gives the number of processes; empty if none does."""
    given = [name for name in NUMBERS if environment.get(name)]
    if len({environment[name] for name in given}) > 1:
        said = " and ".join(f"{name}={environment[name]}" for name in given)
        raise RequestError(f"{said}: both say how many processes a node has; fix: give one of them")
    return given[0] if given else ""


def _check_ranks(nsys: Nsys | None, job: Job, processes: int) -> None:
    """Refuse to profile ranks that do not exist."""
    if nsys and nsys.ranks != "all":
        last = job.training * processes - 1
        if max(int(one) for one in nsys.ranks.split(",")) > last:
            raise RequestError(f"NSYS_RANKS: {nsys.ranks}, but the last rank is {last}")


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise RequestError(f"{name}: must be a whole number, not {text!r}")
    return int(text)


def _switch(environment: Mapping[str, str], name: str, default: str) -> bool:
    text = environment.get(name) or default
    if text not in ("0", "1"):
        raise RequestError(f"{name}: must be 0 or 1, not {text!r}")
    return text == "1"
