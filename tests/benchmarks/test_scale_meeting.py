"""The nodes' rendezvous: formulas, the simulation, and the real thing in small."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousJoinOp,
)

from benchmarks.scale import facts, meeting, study
from tests.support.counting_store import Counted

ROOT = Path(__file__).parents[2]


def test_nodes_that_come_at_once_meet_as_computed() -> None:
    shown = meeting.simulate(np.zeros(100), study.STORE, study.HABITS, 60)
    formula = meeting.meeting(100, study.STORE)
    assert shown.joined == 100
    assert shown.writes == pytest.approx(formula.writes, rel=0.02)
    assert shown.seconds == pytest.approx(formula.seconds, rel=0.1)


def test_nodes_that_come_one_after_the_other_write_once() -> None:
    shown = meeting.simulate(np.arange(0, 4, 0.1), study.STORE, study.HABITS, 60)
    assert (shown.joined, shown.writes) == (40, 40)


@pytest.mark.slow
def test_only_so_many_nodes_can_meet_as_computed() -> None:
    """A tenth fewer meet, a tenth more do not, in a minute or two."""
    most = meeting.most(study.STORE, study.HABITS.beat)
    few, many = (
        meeting.simulate(
            np.random.default_rng(7).uniform(0, 30, round(most * part)),
            study.STORE,
            study.HABITS,
            limit,
        )
        for part, limit in ((0.9, 60), (1.1, 120))
    )
    assert few.joined == round(most * 0.9)
    assert few.seconds < 31
    assert many.joined < most / 2


@pytest.fixture
def stores() -> Iterator[Callable[[], dist.TCPStore]]:
    """Connections to a store on 127.0.0.1."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore(
        "127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60)
    )


@pytest.mark.parametrize("ranks", [2, 5])
def test_gloo_asks_as_often_as_computed(
    ranks: int, stores: Callable[[], dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    counts: Counter[str] = Counter()

    def join(rank: int) -> Any:
        store = Counted(stores(), counts)
        return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))

    with ThreadPoolExecutor(ranks) as threads:
        groups = list(threads.map(join, range(ranks)))
    requests, size = meeting.mesh(ranks, facts.GLOO.value)
    assert len(groups) == ranks
    assert counts["set"] + counts["wait"] + counts["get"] == requests
    assert counts["bytes"] == pytest.approx(size, rel=0.1)


@pytest.mark.processes
def test_lazy_gloo_asks_for_few() -> None:
    """What TORCH_GLOO_LAZY_INIT saves, in a process of its own, as torch reads it once."""
    program = textwrap.dedent("""
        import os
        from collections import Counter
        from concurrent.futures import ThreadPoolExecutor
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from tests.support.counting_store import Counted

        def join(rank):
            store = Counted(dist.TCPStore("127.0.0.1", server.port, is_master=False), counts)
            group = dist.ProcessGroupGloo(store, rank, 8, timedelta(seconds=60))
            group.allreduce([torch.ones(1)]).wait()
            return group

        counts = Counter()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with ThreadPoolExecutor(8) as threads:
            groups = list(threads.map(join, range(8)))
        print(counts["set"], counts["wait"] + counts["get"], flush=True)
        os._exit(0)
    """)
    environment = {**os.environ, "TORCH_GLOO_LAZY_INIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["8", "32"], done.stderr


@pytest.mark.slow
def test_torchruns_nodes_join_by_one_value(stores: Callable[[], dist.TCPStore]) -> None:
    """So many writes as computed at most; the list has the bytes that are reckoned with."""
    nodes = 8
    counts: Counter[str] = Counter()

    def join(node: int) -> tuple[int, DynamicRendezvousHandler]:
        store = stores()
        backend = C10dRendezvousBackend(Counted(store, counts), "7.0")
        handler = DynamicRendezvousHandler.from_backend(
            "7.0", store, backend, nodes, nodes, local_addr=f"10.0.{node}.{node}"
        )
        state = handler._state_holder
        handler._op_executor.run(_RendezvousJoinOp(), time.monotonic() + 60)
        return len(state.state.participants), handler

    with ThreadPoolExecutor(nodes) as threads:
        joined = list(threads.map(join, range(nodes)))
    assert [count for count, _ in joined] == [nodes] * nodes
    # Each writes a first value once, which is not counted as a node's own.
    writes = counts["compare_set"] - nodes
    assert nodes <= writes <= meeting.meeting(nodes, study.STORE).writes
    state = joined[0][1]._state_holder.state
    seen = max(state.last_heartbeats.values())
    for number in range(nodes, 250):
        node = _NodeDesc(f"10.0.1.{number}", 12_000 + number, 0)
        state.participants[node] = number
        state.last_heartbeats[node] = seen + timedelta(microseconds=number)
    size = len(pickle.dumps(state)) * 4 / 3  # as text
    assert size / 250 == pytest.approx(facts.PARTICIPANT.value, rel=0.15)
