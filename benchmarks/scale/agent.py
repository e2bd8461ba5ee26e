"""An agent of torchrun without processes: it meets the others, connects as ranks do, and leaves."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

ADDRESS = "127.0.0.1"


class Agent(SimpleElasticAgent):
    """Node `number` of `nodes`, with the connections of so many ranks. `leave` ends it.

    met, connected: when it had its ranks, and when these had asked (time.time()); 0 before.
    """

    def __init__(self, nodes: int, number: int, ranks: int, port: int, timeout: float) -> None:
        parameters = RendezvousParameters(
            "static", f"{ADDRESS}:{port}", "1.0", nodes, nodes, rank=number, timeout=timeout
        )
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks,
            rdzv_handler=create_rdzv_handler(parameters),
            entrypoint="nothing",
            max_restarts=0,
            monitor_interval=0.5,
        )
        super().__init__(spec, exit_barrier_timeout=timeout)
        self._limit = timedelta(seconds=timeout)
        self._stores: list[TCPStore] = []
        self.met = self.connected = 0.0
        self.first = number * ranks
        self.world = nodes * ranks
        self.has_its_ranks = False
        self.leave = threading.Event()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Connect as the ranks do, and ask what gloo's lazy start asks: five things a rank."""
        self.met = time.time()
        group = worker_group.workers
        self.has_its_ranks = [(one.global_rank, one.world_size) for one in group] == [
            (self.first + number, self.world) for number in range(len(group))
        ]
        address, port = str(worker_group.master_addr), int(str(worker_group.master_port))
        for one in group:
            store = TCPStore(
                address,
                port,
                self.world,
                False,
                timeout=self._limit,
            )
            store.set(f"address/{one.global_rank}", "a" * 154)
            self._stores.append(store)
        for one, store in zip(group, self._stores, strict=True):
            for step in (1, -1):
                key = f"address/{(one.global_rank + step) % self.world}"
                store.wait([key], self._limit)
                store.get(key)
        self.connected = time.time()
        return {one.local_rank: one.global_rank for one in group}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.leave.is_set():
            return RunResult(WorkerState.HEALTHY)
        ended = {one.global_rank: None for one in worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED, return_values=ended)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stores.clear()

    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        self._stores.clear()
