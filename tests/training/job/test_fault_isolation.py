"""Finding the faulty node, by arithmetic alone; and the number of requests for many nodes."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from training.errors import RequestError
from training.job.plan import Job
from training.job.preflight.coordinator import WIDTH, Coordinator
from training.job.preflight.fault_isolation import (
    clock_faults,
    further_pairs,
    isolate,
    ring_rounds,
    tree_levels,
    version_faults,
)
from training.job.preflight.finding import Report
from training.job.preflight.protocol import connect
from training.job.preflight.settings import NodeNames, coordinator_port, read_settings

NAMES = NodeNames(Job(id="1", nodes=4), {"NODES": "a b c d"})


def tried(nodes: list[int], bad: set[int]) -> dict[tuple[int, int], bool]:
    """Return the results of the pairs if these nodes are bad."""
    pairs = [pair for one in ring_rounds(nodes) for pair in one]
    found = {pair: bad.isdisjoint(pair) for pair in pairs}
    return found | {pair: bad.isdisjoint(pair) for pair in further_pairs(nodes, found)}


@pytest.mark.parametrize("count", [3, 4, 5, 8, 33, 512])
@pytest.mark.parametrize("bad", [{0}, {1}, {2}])
def test_one_bad_node_is_found(count: int, bad: set[int]) -> None:
    nodes = list(range(count))
    assert isolate(nodes, tried(nodes, bad)).odd == bad


@pytest.mark.parametrize("bad", [{1, 3}, {2, 3, 4}, {0, 7}, {0, 2, 5}])
def test_several_bad_nodes_are_found(bad: set[int]) -> None:
    """Even between neighbors, where one has bad ones on both sides."""
    nodes = list(range(8))
    pairs = tried(nodes, bad)
    assert isolate(nodes, pairs).odd == bad
    sound = set(nodes) - bad
    assert all(any(node in pair and sound & set(pair) for pair in pairs) for node in bad)


def test_what_cannot_be_reported() -> None:
    two = isolate([0, 1], {(0, 1): False})
    assert (two.odd, two.apart) == (frozenset(), (frozenset({0}), frozenset({1})))
    link = isolate([0, 1, 2], {(0, 1): True, (1, 2): False, (0, 2): True})
    assert (link.odd, link.links) == (frozenset(), ((1, 2),))
    halves = isolate([0, 1, 2, 3], {(0, 1): True, (2, 3): True, (1, 2): False, (3, 0): False})
    assert (halves.odd, len(halves.apart)) == (frozenset(), 2)


@pytest.mark.parametrize("count", [2, 3, 7, 512])
def test_rounds_of_pairs(count: int) -> None:
    """Each node is in one pair per round, and three rounds cover all."""
    rounds = ring_rounds(list(range(count)))
    assert len(rounds) <= 3
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len({frozenset(pair) for one in rounds for pair in one}) == (1 if count == 2 else count)


def test_groups_are_a_tree() -> None:
    """All compute; the connections grow linearly with the nodes, not quadratically."""
    found = tree_levels(list(range(512)), WIDTH)
    assert sorted(rank for group in found[0] for rank in group) == list(range(512))
    assert found[1] == [list(range(0, 512, WIDTH))]
    links = sum(len(group) * (len(group) - 1) // 2 for level in found for group in level)
    assert links < 512 * WIDTH
    assert tree_levels([0, 1, 2], 3) == [[[0, 1, 2]]]


@pytest.mark.parametrize(
    ("clocks", "named"),
    [
        ([0, 0.1, -0.2, 0.1], []),
        ([0, 0.1, -7, 0.1], [2]),
        ([0, 60, 60, 60], [0]),  # node 0's own
        ([0, 0, 60, 60], [None]),
        ([0, 60], [None]),
    ],
)
def test_clocks(clocks: list[float], named: list[int | None]) -> None:
    offsets = {rank: (ahead, 0.05) for rank, ahead in enumerate(clocks)}
    assert [fault.rank for fault in clock_faults(offsets, NAMES)] == named


def test_a_slow_answer_is_no_wrong_clock() -> None:
    assert clock_faults({0: (0.0, 0.0), 1: (8.0, 8.5), 2: (0.0, 0.0)}, NAMES) == []


def report(rank: int, **versions: str) -> Report:
    return Report(
        rank=rank, name="", findings=(), versions=versions, backend="gloo", processes=1, wrote=True
    )


def test_versions() -> None:
    same = [report(0, torch="2.13"), report(1, torch="2.13"), report(2, torch="2.11")]
    (fault,) = version_faults(same, NAMES)
    assert (fault.rank, fault.text) == (2, "torch is 2.11, not 2.13 as on a, b")
    (fault,) = version_faults(same[1:], NAMES)
    assert fault.rank is None
    assert fault.text == "torch: 2.13 on b; 2.11 on c: which is right is not known"


@pytest.mark.parametrize(
    ("master", "hub"), [(61000, 63268), (65535, 63267), (29500, 29501), (60999, 61000)]
)
def test_port(master: int, hub: int) -> None:
    assert coordinator_port(Job(id="1", nodes=2, port=master)) == hub


def test_names_of_another_number_are_not_of_this_step() -> None:
    names = NodeNames(Job(id="1", nodes=2), {"NODES": "a b c"})
    names.learn(1, "c")
    assert (names[0], names[1], names.host(0)) == ("node 0", "c", "")


def attend(rank: int, port: int, asked: list[dict[str, Any]]) -> None:
    """Be a healthy node, which records what it is asked."""
    wire = connect("127.0.0.1", port, 30)
    wire.send({"run": "many.0", "rank": rank})
    round_ = wire.receive(30)["round"]
    wire.send({"round": round_, "report": report(rank).pack()})
    answers: dict[str, dict[str, Any]] = {
        "look": {"unseen": []},
        "clock": {"clock": time.time()},
        "reduce": {"fault": ""},
    }
    while True:
        message = wire.receive(60)
        asked.append(message)
        wire.send({"round": message["round"], **answers.get(message["do"], {})})
        if message["do"] == "end":
            return wire.close()


@pytest.mark.processes
def test_many_nodes() -> None:
    """A real hub and 256 callers: requests grow linearly with the nodes, not quadratically."""
    count = 256
    given = read_settings({"PREFLIGHT_SECONDS": "60"})
    job = Job(id="many", nodes=count)
    coordinator = Coordinator(job, given, NodeNames(job, {}), time.time, "nonce", 0)
    asked: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    threads = [
        threading.Thread(target=attend, args=(rank, coordinator.port, asked[rank]), daemon=True)
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    coordinator.run()
    for thread in threads:
        thread.join(30)
    messages = [message for own in asked for message in own]
    assert {one["faults"] for one in messages if one["do"] == "end"} == {0}
    assert sum(one["do"] == "end" for one in messages) == count
    assert sum(len(one["ranks"]) for one in messages if one["do"] == "look") <= 3 * count
    assert max(one["world"] for one in messages if one["do"] == "reduce") == WIDTH


@pytest.mark.processes
def test_strangers_and_other_versions() -> None:
    """Strangers are ignored; another version is reported, and its node sent home."""
    given = read_settings({"PREFLIGHT_SECONDS": "30"})
    job = Job(id="many", nodes=2)
    coordinator = Coordinator(job, given, NodeNames(job, {}), time.time, "nonce", 0)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    with socket.create_connection(("127.0.0.1", coordinator.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(100) == b""
    for hello, refused in (
        ({"run": "many.1", "rank": 1}, "this is many.0, not many.1"),
        ({"run": "many.0", "rank": 2}, "there is no node 2 among 2"),
    ):
        wire = connect("127.0.0.1", coordinator.port, 30)
        wire.send(hello)
        assert wire.receive(30) == {"refused": refused}
    asked: list[dict[str, Any]] = []
    own = threading.Thread(target=attend, args=(0, coordinator.port, asked), daemon=True)
    own.start()
    wire = connect("127.0.0.1", coordinator.port, 30)
    wire.send({"run": "many.0", "rank": 1})
    wire.send({"round": wire.receive(30)["round"], "report": {"rank": 1}})
    end = wire.receive(30)
    wire.send({"round": end["round"]})
    own.join(30)
    thread.join(30)
    assert end["do"] == "end" and end["bad"] == ["node 1"]
    shown = "node 1: versions: its report cannot be read: it runs another version of training/"
    assert asked[-1]["wrong"] == [shown]


@pytest.mark.parametrize("seconds", ["1e3", "nan", "1_000", " 60", "-5", "0", "86401", "9" * 400])
def test_seconds_that_a_launcher_would_read_differently(seconds: str) -> None:
    """Or that nobody can wait for: srun's time limit is computed from them, too."""
    with pytest.raises(RequestError, match="PREFLIGHT_SECONDS: must be 1 to 86400 seconds"):
        read_settings({"PREFLIGHT_SECONDS": seconds})
    assert read_settings({"PREFLIGHT_SECONDS": "090.5"}).limit == 90.5
