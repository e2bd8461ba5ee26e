"""What preflight reads from the environment: its settings, and the names of the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from training.errors import RequestError
from training.job.plan import PORTS, Job


@dataclass(frozen=True)
class Settings:
    """The settings in PREFLIGHT, PREFLIGHT_SECONDS and CHECKPOINTS."""

    wanted: bool
    limit: float  # seconds, each: to connect, for a node's own checks, for the all-reduce
    shared: Path | None  # the folder that all nodes must see

    @property
    def pair_limit(self) -> float:
        """Seconds for two nodes to compute together, after all together have failed to."""
        return self.limit / 4

    @property
    def timeout(self) -> float:
        """Seconds without a word from node 0: more than it can need between two messages."""
        return 8 * self.limit + 120


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the variables; an empty one counts as unset. Raises RequestError."""
    wanted = environment.get("PREFLIGHT") or "1"
    if wanted not in ("0", "1"):
        raise RequestError(f"PREFLIGHT: must be 0 (left out) or 1, not {wanted!r}")
    seconds = environment.get("PREFLIGHT_SECONDS") or "120"
    # As launchers read it, in bash: no exponent.
    limit = float(seconds) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", seconds, re.ASCII) else 0.0
    if not 1 <= limit <= 86400:
        raise RequestError(f"PREFLIGHT_SECONDS: must be 1 to 86400 seconds, not {seconds!r}")
    folder = environment.get("CHECKPOINTS")
    return Settings(wanted == "1", limit, Path(folder) if folder else None)


def coordinator_port(job: Job) -> int:
    """The port of node 0's hub; 0, any free one, if node 0 is alone.

    Half the launcher's range away from the job's own port: one next to it could be another job's
    where nodes are shared, as jobs with neighboring numbers run at the same time.
    """
    first, count = PORTS
    if job.nodes == 1:
        return 0
    if first <= job.port < first + count:
        return first + (job.port - first + count // 2) % count
    return job.port + 1 if job.port < 65535 else job.port - 1


class NodeNames:
    """The host names of the nodes by rank, as far as they are known."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        given = environment.get("NODES", "").split()
        # If their number differs, they are the job's, and this is a step on some of its nodes.
        self._hosts = dict(enumerate(given)) if len(given) == job.nodes else {}

    def learn(self, rank: int, host: str) -> None:
        """Use the name that a node gives itself, unless the launcher gave one."""
        if host:
            self._hosts.setdefault(rank, host)

    def host(self, rank: int) -> str:
        """Slurm's name of a node, by which it can be excluded; empty if not known."""
        return self._hosts.get(rank, "")

    def __getitem__(self, rank: int) -> str:
        return self._hosts.get(rank) or f"node {rank}"

    def several(self, ranks: Iterable[int]) -> str:
        """Name several nodes, but at most the first eight."""
        named = [self[rank] for rank in sorted(ranks)]
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        return ", ".join(named[:8]) + more
