"""The models of docs/scale.md: their formulas, their simulations, and the real thing in small."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import exp, expm1
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as listed
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousJoinOp,
)

from benchmarks.scale import facts, failing, meeting, page, reading, staging, study
from benchmarks.scale.failing import Job
from training.data.packed import WORD, Packed, PackedWriter
from training.job.plan import PATIENCE
from training.sections import DataConfig, RunConfig

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "scale.json"
GB = 1e9


def random() -> np.random.Generator:
    return np.random.default_rng(7)


# The page.


def test_command_line_makes_the_page_again(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(page.PAGE, docs)
    done = run("--output", str(tmp_path), "--docs", str(docs))
    assert done.returncode == 0, done.stderr
    assert close(json.loads((tmp_path / "scale.json").read_text()), json.loads(RESULT.read_text()))
    pictures = {path.name: path.stat().st_size for path in (docs / "scale").iterdir()}
    assert pictures.keys() == {path.name for path in (page.PAGE.parent / "scale").iterdir()}
    assert all(4_000 < size < 80_000 for size in pictures.values())
    assert all(f"](scale/{name})" in (docs / "scale.md").read_text() for name in pictures)


def test_the_page_has_the_tables_of_the_result() -> None:
    told = page.PAGE.read_text()
    assert page.fill(told, json.loads(RESULT.read_text())) == told


def test_no_page_is_refused(tmp_path: Path) -> None:
    done = run("--docs", str(tmp_path))
    assert done.returncode == 2
    assert "no scale.md" in done.stderr


def test_a_table_without_its_place_is_told() -> None:
    with pytest.raises(ValueError, match="<!-- image -->"):
        page.fill("# A page\n", json.loads(RESULT.read_text()))


def test_what_the_page_says_in_words() -> None:
    """Figures of the text, which no table fills in."""
    result = json.loads(RESULT.read_text())
    saves = {(row["nodes"], row["background"]): row for row in result["saves"]}
    best, waiting = (saves[4096, background] for background in (True, False))
    assert round(best["daly_s"]) == 85
    assert round(best["mtbf_s"] / 60) == 93
    assert round(best["restart_s"], -1) == 350
    assert round(best["goodput"] - waiting["goodput"], 2) == 0.04
    assert round(saves[512, True]["goodput"] - saves[512, False]["goodput"], 3) == 0.014
    assert round(best["writing_s"] / (best["daly_s"] + best["stall_s"]), 2) == 0.13
    assert best["goodput"] - best["goodput_hour"] > 0.25
    job = study.job(4096, background=True)
    flat = min(failing.goodput(job, best["daly_s"] * factor) for factor in (0.5, 2))
    assert best["goodput"] - flat < 0.004
    assert 1 - failing.goodput(job, 10 * best["daly_s"]) == pytest.approx(0.13, abs=0.005)
    assert round(result["most_nodes"], -1) == 910
    assert round(study.STORE.write(4096) + study.STORE.away(4096), 3) == 0.024


def test_settings_that_the_models_take_are_those_of_the_project() -> None:
    assert facts.JOIN.value == PATIENCE
    assert facts.SEQUENCE.value == DataConfig.seq_length
    assert facts.TOKEN.value == WORD.itemsize
    assert RunConfig.checkpoint_interval == 20_000
    assert RunConfig.async_checkpoint
    assert RunConfig.hang_abort_seconds == 600


# Failures.

WAITING = Job(mtbf=5000, stall=60, writing=0, restart=300)
BACKGROUND = Job(mtbf=5000, stall=2, writing=60, restart=300)


def test_formulas_of_young_and_daly() -> None:
    assert failing.young(50, 100 * 50 / 2) == pytest.approx(500)
    # d / 2M = 0.01: 500 (1 + 0.1 / 3 + 0.01 / 9) - 50
    assert failing.daly(50, 2500) == pytest.approx(500 * (1 + 0.1 / 3 + 0.01 / 9) - 50)
    assert failing.daly(200, 100) == 100
    assert failing.daly(1e-6, 1e6) == pytest.approx(failing.young(1e-6, 1e6), rel=1e-5)


def test_without_writing_it_is_dalys_time() -> None:
    work, job = 700.0, WAITING
    time = job.mtbf * exp(job.restart / job.mtbf) * expm1((work + job.stall) / job.mtbf) / work
    assert failing.goodput(job, work) == pytest.approx(1 / time)


@pytest.mark.parametrize(
    ("job", "work"),
    [
        (WAITING, 200.0),
        (WAITING, 750.0),
        (WAITING, 4000.0),
        (BACKGROUND, 140.0),
        (BACKGROUND, 1000.0),
        (BACKGROUND, 20.0),  # less than a save takes to write
    ],
)
def test_simulated_goodput_is_the_formulas(job: Job, work: float) -> None:
    simulated = failing.simulate(job, work, 50_000, random())
    assert 1 - simulated == pytest.approx(1 - failing.goodput(job, work), rel=0.03)


@pytest.mark.parametrize(("stall", "dalys", "youngs"), [(5, 0.002, 0.02), (50, 0.02, 0.08)])
def test_the_best_interval_is_dalys(stall: float, dalys: float, youngs: float) -> None:
    """Within these parts of it; and nothing is lost beside what the simulation finds best."""
    job = Job(mtbf=5000, stall=stall, writing=0, restart=0)
    works = np.geomspace(20, 5000, 4001)
    best = float(works[np.argmax([failing.goodput(job, work) for work in works])])
    assert failing.daly(stall, job.mtbf) == pytest.approx(best, rel=dalys)
    assert failing.young(stall, job.mtbf) == pytest.approx(best, rel=youngs)
    assert failing.young(stall, job.mtbf) > failing.daly(stall, job.mtbf)

    tried = [best * factor for factor in (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.5)]
    found = [failing.simulate(job, work, 50_000, random()) for work in tried]
    daly = failing.simulate(job, failing.daly(stall, job.mtbf), 50_000, random())
    assert daly > max(found) - 0.002
    # The top of a parabola through what was simulated.
    curve = np.polyfit(np.log(tried), found, 2)
    assert float(np.exp(-curve[1] / (2 * curve[0]))) == pytest.approx(best, rel=0.15)


def test_writing_in_the_background_keeps_the_interval() -> None:
    works = np.geomspace(61, 2000, 2001)
    best = works[np.argmax([failing.goodput(BACKGROUND, work) for work in works])]
    assert failing.interval(BACKGROUND) == pytest.approx(best, rel=0.01)
    slow = Job(mtbf=5000, stall=2, writing=500, restart=0)
    assert failing.interval(slow) == 500
    assert failing.goodput(slow, 500) > failing.goodput(slow, 250)


# The image.


@pytest.mark.parametrize(("nodes", "expected"), [(1, 1.0), (4, 1.0), (64, 6.4)])
def test_readers_share_the_servers(nodes: int, expected: float) -> None:
    """1 GB each, 1 GB/s a node, 10 GB/s in all."""
    assert staging.shared_seconds(nodes, GB, GB, 10 * GB) == expected
    ends = staging.share(np.zeros(nodes), GB, GB, 10 * GB)
    assert ends.max() == pytest.approx(expected)


def test_late_readers_are_not_paid_for_by_early_ones() -> None:
    """Two share 1 GB/s: the first reads alone for half a second, then both get a half."""
    ends = staging.share(np.array([0.0, 0.5]), GB, GB, GB)
    assert ends.tolist() == pytest.approx([1.5, 2.0])
    assert staging.share(np.array([0.0, 9.0]), GB, GB, GB).tolist() == pytest.approx([1.0, 10.0])


@pytest.mark.parametrize(
    ("nodes", "hops"), [(0, 0), (1, 1), (8, 1), (9, 2), (72, 2), (73, 3), (512, 3), (4096, 4)]
)
def test_hops_of_the_tree(nodes: int, hops: int) -> None:
    """8 + 64 nodes are two hops away at most."""
    assert staging.hops(nodes, 8) == hops
    depths = staging.depths(nodes, 8)
    assert (len(depths), max(depths, default=0)) == (nodes, hops)


def test_a_tree_is_its_formula_where_hops_do_not_vary() -> None:
    tree = (500, GB, 8e6, 8, 1.25 * GB, 12.5 * GB, 0.002)
    formula = staging.tree_seconds(*tree)
    assert formula == pytest.approx(125 * 3 * (0.002 + 0.0064))
    assert staging.tree(*tree, 0.0, random()) == pytest.approx(formula)
    assert formula < staging.tree(*tree, 0.5, random()) < 3 * formula


def test_a_slow_card_is_shared_by_the_fan_out() -> None:
    seconds = staging.tree_seconds(8, GB, 1e6, 8, GB, 2 * GB, 0.0)
    assert seconds == pytest.approx(4.0)


# Meeting.


def test_nodes_that_come_at_once_meet_as_computed() -> None:
    told = meeting.simulate(np.zeros(100), study.STORE, study.HABITS, 60)
    formula = meeting.meeting(100, study.STORE)
    assert told.joined == 100
    assert told.writes == pytest.approx(formula.writes, rel=0.02)
    assert told.seconds == pytest.approx(formula.seconds, rel=0.1)


def test_nodes_that_come_one_after_the_other_write_once() -> None:
    told = meeting.simulate(np.arange(0, 4, 0.1), study.STORE, study.HABITS, 60)
    assert (told.joined, told.writes) == (40, 40)


def test_only_so_many_nodes_can_meet_as_computed() -> None:
    """A tenth fewer meet, a tenth more do not, in a minute or two."""
    most = meeting.most(study.STORE, study.HABITS.beat)
    few, many = (
        meeting.simulate(
            random().uniform(0, 30, round(most * part)), study.STORE, study.HABITS, limit
        )
        for part, limit in ((0.9, 60), (1.1, 120))
    )
    assert few.joined == round(most * 0.9)
    assert few.seconds < 31
    assert many.joined < most / 2


class Counted(dist.Store):
    """A store that counts what is asked of it, of all that share `counts`."""

    def __init__(self, inner: dist.Store, counts: Counter[str]) -> None:
        super().__init__()
        self._inner, self._counts, self._lock = inner, counts, threading.Lock()

    def _count(self, name: str, size: int = 0) -> None:
        with self._lock:
            self._counts[name] += 1
            self._counts["bytes"] += size

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._count("get", len(value))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._count("wait")
        self._inner.wait(keys, *timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set")
        return self._inner.compare_set(key, expected, desired)


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


def test_lazy_gloo_asks_for_few() -> None:
    """What TORCH_GLOO_LAZY_INIT saves, in a process of its own, as torch reads it once."""
    program = textwrap.dedent("""
        import os
        from collections import Counter
        from concurrent.futures import ThreadPoolExecutor
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from tests.test_scale_sim import Counted

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
        timeout=120,
    )
    assert done.stdout.split() == ["8", "32"], done.stderr


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


# Checkpoints and data.


def test_a_checkpoints_list_has_the_bytes_that_are_reckoned_with() -> None:
    tensors, shards = 40, 64
    properties = listed.TensorProperties(dtype=torch.float32)
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for tensor in range(tensors):
        name = f"model.layers.{tensor}.mlp.gate_proj.weight"
        offsets = [torch.Size([10 * shard, 0]) for shard in range(shards)]
        chunks = [listed.ChunkStorageMetadata(one, torch.Size([10, 4096])) for one in offsets]
        size = torch.Size([10 * shards, 4096])
        state[name] = listed.TensorStorageMetadata(properties, size, chunks)
        for shard, offset in enumerate(offsets):
            index = listed.MetadataIndex(name, offset, shard)
            storage[index] = _StorageInfo(f"__{shard}_0.distcp", 163_840 * tensor, 163_840)
    written = pickle.dumps(listed.Metadata(state, None, storage))
    assert len(written) / tensors / shards == pytest.approx(facts.ENTRY.value, rel=0.15)


def test_a_rank_opens_each_file_as_often_as_computed(tmp_path: Path) -> None:
    files = 20
    for number in range(files):
        with PackedWriter(tmp_path / f"{number:02}.npy") as file:
            file.write(np.arange(100))
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and str(tmp_path) in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    Packed(f"{tmp_path}/*.npy", 10)
    watching = False
    # One more: a file in which a loss bit is looked for.
    assert len(opened) == files * facts.OPENS.value + 1


def test_windows_that_are_read() -> None:
    """One sample reads a window; many read the set, and not more."""
    total, ahead, sample = 1 << 26, 1 << 20, 4096
    assert reading.windows_read(total, ahead, 1) == pytest.approx(ahead)
    assert reading.windows_read(total, ahead, 10_000) == pytest.approx(total)
    for samples in (10, 60, 200):
        drawn = [
            reading.simulate(total, ahead, sample, samples, np.random.default_rng(seed))
            for seed in range(20)
        ]
        assert np.mean(drawn) == pytest.approx(
            reading.windows_read(total, ahead, samples), rel=0.05
        )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.scale_sim", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def close(found: Any, expected: Any) -> bool:
    """Equal but for the last of four digits."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            close(found[name], expected[name]) for name in expected
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=2e-3))
    return bool(found == expected)
