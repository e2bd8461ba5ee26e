"""What a node's part of a job is: decided by pure functions from what Slurm and the node say."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.errors import RequestError

PORTS = 61000, 4536  # the first, and how many: above those that the kernel gives to connections
PATIENCE = 900  # seconds for the slowest node to start its container and join
NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")  # the nearest one counts
GIVEN = "from the environment"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm says about the job, as one node sees it."""

    id: str
    restarts: int = 0
    node_rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"  # of the node of rank 0, as all others reach it
    port: int = 0  # 0: any free one

    @property
    def run_id(self) -> str:
        """Name one start of the job: processes of the start before it must not join."""
        return f"{self.id}.{self.restarts}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """What this node has, as seen from inside the container."""

    gpus: int
    cores: int
    address: str  # as the others reach it
    interface: str  # network interface of that address; empty if none has it


@dataclass(frozen=True)
class Decision:
    """One line of the block: what was decided, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a node needs to start its processes."""

    job: Job
    processes: int  # on this node
    processes_why: str
    local_address: str
    variables: tuple[Decision, ...]  # for the processes
    module: str
    flags: tuple[str, ...]

    @property
    def endpoint(self) -> str:
        return f"{self.job.address}:{self.job.port}"

    @property
    def torchrun(self) -> tuple[str, ...]:
        """Torchrun's arguments.

        Who hosts the rendezvous is said, not guessed from host names: they may not resolve, and
        two nodes may share an address.
        """
        hosts = "true" if self.job.node_rank == 0 else "false"
        return (
            f"--nnodes={self.job.nodes}",
            f"--nproc-per-node={self.processes}",
            f"--rdzv-id={self.job.run_id}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf=is_host={hosts},join_timeout={PATIENCE},read_timeout={PATIENCE}",
            f"--local-addr={self.local_address}",
            "--max-restarts=0",
            "--monitor-interval=0.5",
            "-m",
            self.module,
            *self.flags,
        )

    @property
    def title(self) -> str:
        return f"node {self.job.node_rank} of {self.job.nodes}: {_count(self.processes, 'process')}"

    def block(self) -> str:
        """Tell every decision with its reason."""
        first = "hosted here" if self.job.node_rank == 0 else "hosted by node 0"
        decisions = (
            Decision("NPROC_PER_NODE", str(self.processes), self.processes_why),
            Decision("rendezvous", self.endpoint, f"{first}, as {self.job.run_id}"),
            Decision("local address", self.local_address, "as the other nodes reach this one"),
            *self.variables,
        )
        width = max(len(one.name) for one in decisions)
        span = max(len(one.value) for one in decisions)
        lines = [f"  {one.name:{width}}  {one.value:{span}}  {one.why}" for one in decisions]
        command = shlex.join(("torchrun", *self.torchrun))
        return "\n".join([f"training.launch: {self.title}", *lines, f"  {command}"])


def read_job(environment: Mapping[str, str]) -> Job:
    """Read Slurm's variables. Raises RequestError for what cannot be a job's."""
    id = environment.get("SLURM_JOB_ID", "")
    if not id:
        return Job(
            id="local",
            address=environment.get("MASTER_ADDR") or Job.address,
            port=_whole(environment, "MASTER_PORT", 0),
        )
    if _whole(environment, "SLURM_LOCALID", 0):
        raise RequestError("training.launch starts a node's processes itself: --ntasks-per-node=1")
    nodes = next((_whole(environment, name, 1) for name in NODES if environment.get(name)), 1)
    if nodes > 1 and not environment.get("MASTER_ADDR"):
        raise RequestError(
            "MASTER_ADDR: must be the address of the job's first node; the launchers set it from "
            "`scontrol show hostnames`"
        )
    first, count = PORTS
    number = _whole(environment, "SLURM_JOB_ID", 0)
    return Job(
        id=id,
        restarts=_whole(environment, "SLURM_RESTART_COUNT", 0),
        node_rank=_whole(environment, "SLURM_NODEID", 0),
        nodes=nodes,
        address=environment.get("MASTER_ADDR") or Job.address,
        port=_whole(environment, "MASTER_PORT", first + number % count),
    )


def make_plan(
    job: Job,
    node: Node,
    environment: Mapping[str, str],
    module: str,
    flags: Sequence[str],
    nproc: int | None = None,
) -> Plan:
    """Decide; looks at nothing but its arguments. Raises RequestError."""
    processes, why = _processes(node, environment, nproc)
    chosen = [
        Decision(
            "OMP_NUM_THREADS",
            str(max(1, node.cores // processes)),
            f"{_count(node.cores, 'core')} / {_count(processes, 'process')}",
        )
    ]
    if job.id != "local":
        # Ranks that share a cache on a network folder overwrite each other's files.
        folder = f"{environment.get('TMPDIR', '/tmp')}/triton-{job.run_id}"
        chosen.append(Decision("TRITON_CACHE_DIR", folder, "on this node, of this job alone"))
    if job.nodes > 1 and node.interface:
        # gloo would look its own host name up, which on many machines is a loopback address.
        why_interface = f"the interface of {node.address}"
        chosen.append(Decision("GLOO_SOCKET_IFNAME", node.interface, why_interface))
    return Plan(
        job=job,
        processes=processes,
        processes_why=why,
        local_address=job.address if job.node_rank == 0 else node.address,
        variables=tuple(
            Decision(one.name, environment[one.name], GIVEN) if one.name in environment else one
            for one in chosen
        ),
        module=module,
        flags=tuple(flags),
    )


def _processes(node: Node, environment: Mapping[str, str], nproc: int | None) -> tuple[int, str]:
    if nproc is not None:
        count, why = nproc, "--nproc"
    elif environment.get("NPROC_PER_NODE"):
        count, why = _whole(environment, "NPROC_PER_NODE", 1), GIVEN
    elif node.gpus:
        count, why = node.gpus, _count(node.gpus, "GPU")
    else:
        count, why = 1, "no GPU"
    if count < 1:
        raise RequestError(f"NPROC_PER_NODE: must be at least 1, not {count}")
    return count, why


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise RequestError(f"{name}: must be a whole number, not {text!r}")
    return int(text)


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"
