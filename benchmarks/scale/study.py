"""The models at every number of nodes, with the numbers of facts.py: the rows of the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.scale import facts, failing, meeting, reading, saving, staging
from benchmarks.scale.failing import Job
from training.checkpoint.interval import daly

SEED = 2023
LARGEST = 512  # nodes that are let meet at once, in a simulation
MINUTE = 60.0  # s after which a simulated meeting is looked at
INTERVALS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the best one, simulated
STARTS = 20_000  # of a job, in a simulation of its failures
TRIED = 1 << 28, 16 * 1024 + 4  # bytes of a set and of a sample: what was tried here

SERVERS = facts.FILE_SYSTEM.value / facts.SERVER.value
READS = facts.FILE_SYSTEM.value * facts.NETWORK.value  # bytes/s of the whole file system
WRITES = facts.FILE_SYSTEM.value * facts.DISK.value
STORE = meeting.Store(
    request=facts.REQUEST.value,
    rate=facts.STORE.value,
    participant=facts.PARTICIPANT.value,
    turn=facts.TURN.value,
    pickle=facts.PICKLE.value,
)
HABITS = meeting.Habits(facts.POLL.value, facts.BEAT.value, facts.EXPIRY.value)
SIZE = facts.PARAMETERS.value * facts.STATE.value  # bytes of a checkpoint


def image_rates(stripes: float) -> tuple[float, float]:
    """Give the bytes/s that one node, and all, can read of a file on so many servers."""
    client = min(facts.CLIENT.value, stripes * facts.CLIENT_SERVER.value)
    return client, stripes * facts.SERVER.value * facts.NETWORK.value


def mounted_client(stripes: float) -> float:
    """Give the bytes/s of a node that mounts it: one read after the other, each of one server."""
    rate = staging.mounted_rate(
        facts.MOUNT_READ.value, facts.MOUNT_WAIT.value, facts.CLIENT_SERVER.value
    )
    return min(rate, image_rates(stripes)[0])


def image(nodes: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Bring the image to all nodes in each way."""
    size, rows = facts.IMAGE.value, []
    starts = np.sort(random.uniform(0, facts.SPREAD.value, nodes))  # (nodes,)
    for way, part, stripes in (
        ("copy", 1.0, facts.STRIPES.value),
        ("copy, all servers", 1.0, SERVERS),
        ("mount", facts.MOUNTED.value, facts.STRIPES.value),
        ("mount, all servers", facts.MOUNTED.value, SERVERS),
    ):
        own, servers = image_rates(stripes)
        own = (
            mounted_client(stripes) if way.startswith("mount") else min(own, facts.NODE_DISK.value)
        )
        ends = staging.share(starts, part * size, own, servers)
        rows.append(
            {
                "nodes": nodes,
                "way": way,
                "bytes": nodes * part * size,
                "formula_s": staging.shared_seconds(nodes, part * size, own, servers),
                "simulated_s": float(ends.max()),
            }
        )
    tree = (nodes, size, facts.BLOCK.value, int(facts.FANOUT.value))
    network = (facts.FLOW.value, facts.CLIENT.value, facts.HOP.value)
    rows.append(
        {
            "nodes": nodes,
            "way": "sbcast",
            "bytes": size,
            "formula_s": staging.tree_seconds(*tree, *network),
            "simulated_s": staging.tree(*tree, *network, facts.JITTER.value, random),
        }
    )
    return rows


def checkpoint(nodes: int) -> dict[str, Any]:
    """Save the model on so many nodes, sharded over all ranks."""
    ranks = nodes * int(facts.GPUS.value)
    writing = saving.writing_seconds(
        SIZE,
        nodes,
        ranks,
        facts.NODE_WRITE.value,
        WRITES,
        facts.CHECKSUM.value,
        facts.METADATA.value,
    )
    listed = saving.entries(int(facts.TENSORS.value), ranks)
    return {
        "nodes": nodes,
        "files": ranks,
        "rank_bytes": SIZE / ranks,
        "bytes_per_s": min(nodes * facts.NODE_WRITE.value, WRITES),
        "stall_s": saving.stall_seconds(SIZE, ranks, facts.COPY.value),
        "writing_s": writing,
        "loading_s": saving.loading_seconds(SIZE, nodes, facts.CLIENT.value, WRITES),
        "entries": listed,
        "list_bytes": listed * facts.ENTRY.value,
        "list_s": listed * facts.ENTRY_TIME.value,
    }


def job(nodes: int, *, background: bool, mtbf: float = facts.NODE_MTBF.value) -> Job:
    """Describe the job on so many nodes, saved in the background or not; grouped shards."""
    saved = checkpoint(nodes)
    own, servers = mounted_client(facts.STRIPES.value), image_rates(facts.STRIPES.value)[1]
    mount = staging.shared_seconds(nodes, facts.MOUNTED.value * facts.IMAGE.value, own, servers)
    restart = (
        facts.DETECTION.value + facts.REQUEUE.value + facts.START.value + mount + saved["loading_s"]
    )
    # A rank's part does not shrink below that of a group that shares one copy of the state.
    stall = max(saved["stall_s"], checkpoint(facts.NODES[0])["stall_s"])
    if background:
        return Job(mtbf / nodes, stall, saved["writing_s"], restart)
    return Job(mtbf / nodes, saved["writing_s"], 0.0, restart)


def saves(nodes: int) -> list[dict[str, Any]]:
    """Find how often to save, and what is left of the time."""
    rows = []
    for background in (True, False):
        one = job(nodes, background=background)
        best = failing.interval(one)
        rows.append(
            {
                "nodes": nodes,
                "background": background,
                "mtbf_s": one.mtbf,
                "mtbf_worst_s": facts.NODE_MTBF_WORST.value / nodes,
                "mtbf_best_s": facts.NODE_MTBF_BEST.value / nodes,
                "stall_s": one.stall,
                "writing_s": one.writing,
                "restart_s": one.restart,
                "young_s": failing.young(one.stall, one.mtbf),
                "daly_s": daly(one.stall, one.mtbf),
                "interval_s": best,
                "goodput": failing.goodput(one, best),
                "goodput_hour": failing.goodput(one, 3600.0),
            }
        )
    return rows


def in_place(nodes: int) -> list[dict[str, Any]]:
    """Restart processes in place where the node is sound: none, the published share, more."""
    one, row = job(nodes, background=True), checkpoint(nodes)
    quick = facts.IN_PLACE.value + row["loading_s"]
    work = failing.interval(one)
    return [
        {
            "nodes": nodes,
            "share": share,
            "requeue_s": one.restart,
            "in_place_s": quick,
            "goodput": failing.goodput_of_kinds(
                one, work, [(share, quick), (1 - share, one.restart)]
            ),
        }
        for share in (0.0, facts.PROCESS.value, 0.5, 1.0)
    ]


def tried(nodes: int) -> list[dict[str, Any]]:
    """Simulate failures around the best interval, saved in the background."""
    one = job(nodes, background=True)
    best = failing.interval(one)
    return [
        {
            "nodes": nodes,
            "interval_s": best * factor,
            "formula": failing.goodput(one, best * factor),
            "simulated": failing.simulate(one, best * factor, STARTS, np.random.default_rng(SEED)),
        }
        for factor in INTERVALS
    ]


def rendezvous(nodes: int, random: np.random.Generator) -> dict[str, Any]:
    """Let the nodes meet, and the ranks after them."""
    ranks = nodes * int(facts.GPUS.value)
    row: dict[str, Any] = {"nodes": nodes, "ranks": ranks}
    once = meeting.meeting(nodes, STORE)
    row |= {"at_once_s": once.seconds, "at_once_writes": once.writes, "at_once_bytes": once.bytes}
    for name, spread in (("at_once", 0.0), ("spread", facts.ARRIVAL.value)):
        if spread or nodes <= LARGEST:
            simulated = meeting.simulate(random.uniform(0, spread, nodes), STORE, HABITS, MINUTE)
            row[f"{name}_simulated"] = vars(simulated)
    requests, size = meeting.mesh(ranks, facts.GLOO.value)
    return row | {
        "polled_bytes_per_s": meeting.polled(nodes, STORE, facts.POLL.value),
        "mesh_requests": requests,
        "mesh_bytes": size,
        "mesh_s": requests * facts.REQUEST.value + size / facts.STORE.value,
        "mesh_sockets": ranks - 1,
    }


def data(nodes: int) -> dict[str, Any]:
    """Read the samples of the large model and of a small one."""
    sample = (facts.SEQUENCE.value + 1) * facts.TOKEN.value
    row: dict[str, Any] = {"nodes": nodes}
    for name, parameters in (("large", facts.PARAMETERS.value), ("small", facts.SMALL.value)):
        tokens = reading.tokens_a_second(
            parameters, facts.GPUS.value, facts.PEAK.value, facts.MFU.value
        )
        samples = tokens / facts.SEQUENCE.value  # a second
        row |= {f"{name}_node": samples * sample, f"{name}_all": nodes * samples * sample}
        for ahead, window in (("usual", facts.READ_AHEAD_USUAL), ("here", facts.READ_AHEAD)):
            # Of the first hour, before much is in memory.
            read = reading.windows_read(facts.SET.value, window.value, int(samples * facts.HOUR))
            row[f"{name}_all_{ahead}"] = nodes * read / facts.HOUR
        files, kept = int(facts.FILES.value), facts.KEPT_OPEN.value
        row[f"{name}_opened"] = reading.opened_anew(nodes * samples, files, kept)  # a second
    return row


def ahead(random: np.random.Generator) -> list[dict[str, Any]]:
    """Read what was tried here: samples of a small set in a shuffled order."""
    total, sample = TRIED
    window = int(facts.READ_AHEAD.value)
    return [
        {
            "samples": samples,
            "bytes": samples * sample,
            "formula_bytes": reading.windows_read(total, window, samples),
            "simulated_bytes": reading.simulate(total, window, sample, samples, random),
        }
        for samples in (10, 50, 100, 200, 400)
    ]


def study() -> dict[str, Any]:
    """Run all models; the same figures every time, to four digits."""
    nodes, meetings = facts.NODES, facts.MEETINGS
    random = np.random.default_rng(SEED)
    result = {
        "what": "models of a job on 8 to 4,096 nodes; not a measurement",
        "how": "python -m benchmarks.scale_sim",
        "seed": SEED,
        "facts": _facts(),
        "image": [row for count in nodes for row in image(count, random)],
        "checkpoint": [checkpoint(count) for count in nodes],
        "saves": [row for count in nodes for row in saves(count)],
        "in_place": [row for count in nodes for row in in_place(count)],
        "failures": [row for count in nodes for row in tried(count)],
        "rendezvous": [rendezvous(count, np.random.default_rng(SEED)) for count in meetings],
        "most_nodes": meeting.most(STORE, facts.BEAT.value),
        "data": [data(count) for count in nodes],
        "ahead": ahead(np.random.default_rng(SEED)),
    }
    return {name: _rounded(value) for name, value in result.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _facts() -> list[dict[str, Any]]:
    found = {name: one for name, one in vars(facts).items() if isinstance(one, facts.Fact)}
    return [{"name": name, **vars(one)} for name, one in found.items()]
