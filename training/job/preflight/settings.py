"""What the environment says to preflight: what is asked of it, and what the nodes are called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from training.errors import RequestError
from training.job.plan import PORTS, Job


@dataclass(frozen=True)
class Settings:
    """Read from PREFLIGHT, PREFLIGHT_SECONDS and CHECKPOINTS."""

    wanted: bool
    limit: float  # seconds to come, for a node's own checks, and for the all-reduce: each
    shared: Path | None  # the folder that all nodes see

    @property
    def pair_limit(self) -> float:
        """Seconds for two nodes to compute together, once all have failed to."""
        return self.limit / 4

    @property
    def timeout(self) -> float:
        """Seconds without a word from node 0 that are more than it can need."""
        return 8 * self.limit + 120


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the variables; an empty one is not there. Raises RequestError."""
    wanted = environment.get("PREFLIGHT") or "1"
    if wanted not in ("0", "1"):
        raise RequestError(f"PREFLIGHT: must be 0 (left out) or 1, not {wanted!r}")
    seconds = environment.get("PREFLIGHT_SECONDS") or "120"
    try:
        limit = float(seconds)
    except ValueError:
        limit = math.nan
    if not 1 <= limit <= 86400:
        raise RequestError(f"PREFLIGHT_SECONDS: must be 1 to 86400 seconds, not {seconds!r}")
    folder = environment.get("CHECKPOINTS")
    return Settings(wanted == "1", limit, Path(folder) if folder else None)


def coordinator_port(job: Job) -> int:
    """The port of node 0's hub; 0, any free one, where node 0 is alone.

    Half the launcher's range away from the job's own port: the next job's would be too near where
    nodes are shared, as jobs of neighbouring numbers run together.
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
        # Of another number, they are the job's and not those of a step on some of its nodes.
        self._hosts = dict(enumerate(given)) if len(given) == job.nodes else {}

    def learn(self, rank: int, host: str) -> None:
        """Take the name that a node gives itself where the launcher gave none."""
        if host:
            self._hosts.setdefault(rank, host)

    def host(self, rank: int) -> str:
        """Slurm's name, by which it can be excluded; empty if it is not known."""
        return self._hosts.get(rank, "")

    def __getitem__(self, rank: int) -> str:
        return self._hosts.get(rank) or f"node {rank}"

    def several(self, ranks: Iterable[int]) -> str:
        """Name several, the first eight of many."""
        named = [self[rank] for rank in sorted(ranks)]
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        return ", ".join(named[:8]) + more
