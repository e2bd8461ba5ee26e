"""What the nodes are called: by Slurm's names, which the launcher and the nodes tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from training.job.plan import Job


class Names:
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
