"""How the agents of a job's nodes meet: the choice of torchrun's rendezvous, and what it needs.

c10d keeps the list of all nodes in one value at node 0, which each node rewrites every 5 s; by
docs/background/scale/meeting.md that ends at some 910 nodes. The static rendezvous has no list:
each node takes its rank from Slurm, tells node 0 how many processes it has, and learns the rank of
its first one. Larger jobs use it. It cannot tell one start of the processes from the next: what
torch 2.13's processes wrote to its store is still there when they are started again, so a job that
uses it restarts no process in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.errors import RequestError
from training.job.machine.ulimits import Limit
from training.job.node import Job
from training.job.types import GIVEN

BACKEND = "RENDEZVOUS"
C10D, STATIC = "c10d", "static"
C10D_NODES = 256
"""The most nodes that c10d is used for: a quarter of its limit, as all may come at once."""
TIMEOUT = 900
"""Seconds for the slowest node to start its container and join."""


@dataclass(frozen=True)
class Rendezvous:
    """A backend, and why it was chosen; `why` is empty for the default."""

    backend: str
    why: str = ""

    @property
    def restarts_in_place(self) -> bool:
        """Whether agents that meet by it can restart their processes in one start of the job."""
        return self.backend != STATIC

    def options(self, job: Job, endpoint: str) -> tuple[str, ...]:
        """Return torchrun's options for this rendezvous.

        They name the host, so that torchrun need not guess it from host names: these may not
        resolve, and two nodes may share an address.
        """
        chosen = (f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={endpoint}")
        if self.backend == STATIC:
            return (*chosen, f"--node-rank={job.node_rank}", f"--rdzv-conf=timeout={TIMEOUT}")
        hosts = "true" if job.node_rank == 0 else "false"
        conf = f"is_host={hosts},join_timeout={TIMEOUT},read_timeout={TIMEOUT}"
        return (*chosen, f"--rdzv-conf={conf}")


def choose_rendezvous(job: Job, environment: Mapping[str, str]) -> Rendezvous:
    """Choose by the number of nodes, unless RENDEZVOUS names one. Raises RequestError."""
    given = environment.get(BACKEND) or ""
    if given not in ("", C10D, STATIC):
        raise RequestError(f"{BACKEND}: must be {C10D} or {STATIC}, not {given!r}")
    if given == STATIC and not job.port:
        raise RequestError(
            f"{BACKEND}: {STATIC} needs a port that all nodes know, and this job, outside of "
            "Slurm, has none; fix: set MASTER_PORT, or leave it out"
        )
    once = "which restarts nothing in place"
    many = f"{job.nodes:,} nodes are too many for {C10D}" if job.nodes > C10D_NODES else ""
    if given:
        doubt = f", though {many}" if many and given == C10D else ""
        return Rendezvous(given, f"{given} {GIVEN}{doubt}" + f", {once}" * (given == STATIC))
    if many:
        return Rendezvous(STATIC, f"{STATIC}, {once}, as {many}")
    return Rendezvous(C10D)


def require_descriptors(job: Job, processes: int, limits: tuple[Limit, ...]) -> None:
    """Refuse a job whose node 0 cannot hold a connection from every node and every process.

    Raises RequestError on node 0; the others have only a few connections.
    """
    if job.node_rank:
        return
    needed = job.nodes * (1 + processes)
    for one in limits:
        if one.name == "nofile" and 0 <= one.hard < needed:
            raise RequestError(
                f"nofile: node 0 may have {one.hard:,} files open (ulimit -Hn), and its store has "
                f"a connection of each of {job.nodes:,} nodes and {job.nodes * processes:,} "
                "processes; fix: set LimitNOFILE=1048576 for slurmd (systemd), and "
                "PropagateResourceLimitsExcept=NOFILE in slurm.conf",
                local=True,
            )
