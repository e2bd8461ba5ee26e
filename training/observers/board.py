"""Where the ranks leave word for each other while their main threads cannot: torch's store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from training.errors import TrainingError
from training.observers.hang_report import Answer
from training.process_group import Group

TIMEOUT = timedelta(seconds=10)
"""How long the store may take; the process that holds it may be the one that hangs."""


class Board:
    """A connection of its own to the store that the ranks met at, and a corner of that store.

    Every method raises RuntimeError if the store does not answer.
    """

    def __init__(self, group: Group) -> None:
        """Connect (a collective call). Raises TrainingError on every rank if one cannot."""
        name = group.broadcast(uuid4().hex)  # torchrun keeps the store when it starts ranks again
        self._store: Any = dist.PrefixStore(f"watch/{name}", group.together(_connect))

    def alarms(self) -> int:
        """Count the alarms that were raised so far."""
        return int(self._store.add("alarms", 0))

    def raise_alarm(self, after: int) -> None:
        """Raise one more, unless another rank has done so after that many."""
        if self.first(f"raise/{after}"):
            self._store.add("alarms", 1)

    def first(self, task: str) -> bool:
        """Tell exactly one of the ranks that ask that it is the one to do a task."""
        return int(self._store.add(task, 1)) == 1

    def answer(self, alarm: int, rank: int, answer: Answer) -> None:
        self._put(f"answer/{alarm}/{rank}", answer.packed())

    def answers(self, alarm: int, world_size: int) -> dict[int, Answer]:
        """Collect what the ranks have answered so far."""
        found = {rank: self._get(f"answer/{alarm}/{rank}") for rank in range(world_size)}
        return {rank: Answer.of(packed) for rank, packed in found.items() if packed}

    def note(self, verdict: str) -> None:
        self._put("verdict", verdict)

    def noted(self) -> str:
        """Give the last verdict; empty if there was none."""
        return self._get("verdict")

    def _put(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._store.add(f"{key}/there", 1)

    def _get(self, key: str) -> str:
        """Give a text; empty if it is not there. A get alone would wait for it."""
        # Not by `check`, which Python has in later versions of torch only.
        there = int(self._store.add(f"{key}/there", 0))
        return self._store.get(key).decode() if there else ""


def _connect() -> Any:
    """Connect to the store of init_process_group, with a client of its own: calls wait in turn."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise TrainingError(
            f"hang_seconds: the ranks cannot reach {host}:{port}, where they met; with "
            "hang_seconds=0 and hang_abort_seconds=0 nothing is watched"
        ) from error
