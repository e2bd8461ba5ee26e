"""Preflight by its command line: several nodes on this machine, some of them bad."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

from tests.support import mounts
from tests.support.preflight_nodes import Ended, Node, Nodes

pytestmark = pytest.mark.processes


@pytest.fixture
def nodes(root: Path, tmp_path: Path) -> Nodes:
    return Nodes(root, tmp_path)


def shown(ended: Ended, host: str) -> str:
    """Return what the lines about a host say."""
    return "\n".join(re.findall(rf"^  {host}: (.*)", ended.err, re.MULTILINE))


def test_nodes_that_are_well(nodes: Nodes) -> None:
    nodes.bad_nodes.write_text("host-of-the-start-before\n")
    left = nodes.shared / ".preflight.99.7"
    left.mkdir()
    first, second = nodes.run([Node(), Node()])
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (second.out, second.err) == ("", "")
    assert "training.preflight: 2 nodes, " in first.out
    for check in ("node", "devices", "folder", "space", "clock", "versions", "inside", "across"):
        assert re.search(rf"^  {check} +ok +\d+\.\d s  ", first.out, re.MULTILINE), first.out
    assert "gloo, 2 processes" in first.out
    assert list(nodes.shared.iterdir()) == []  # neither the old files nor its own


def test_each_bad_node_is_named(nodes: Nodes) -> None:
    """All at once: a clock, another version, a wrong sum, a node that ends during its checks."""
    ends = nodes.run(
        [
            Node(),
            Node(
                "preflight.run = functools.partial(preflight.run, clock=lambda: time.time() + 90)"
            ),
            Node("checks_local.platform.python_version = lambda: '3.9.1'"),
            Node(nodes.worker(error=1)),
            Node("checks_local.check_node = lambda *words: os._exit(1)"),
        ]
    )
    first = ends[0]
    assert [end.code for end in ends] == [87, 87, 87, 87, 1], first.err
    assert re.fullmatch(
        r"clock: (89\.[5-9]|90\.[0-4]) s ahead of the others", shown(first, "host-1")
    )
    assert re.match(r"versions: python is 3\.9\.1, not 3\.\d+", shown(first, "host-2"))
    assert re.search(
        r"inside: process 0: 1 of \d+ elements of the sum are wrong", shown(first, "host-3")
    )
    assert shown(first, "host-4") == "node: it came, and has ended during its own checks"
    assert shown(first, "host-0") == ""
    for check in ("node", "clock", "versions", "inside"):
        assert re.search(rf"^  {check} +BAD ", first.out, re.MULTILINE), first.out
    assert nodes.bad_nodes.read_text() == "host-1\nhost-2\nhost-3\nhost-4\n"
    # A bad node reports its own fault.
    assert "host-1: clock" in ends[1].err and "host-2" not in ends[1].err
    assert [path.name for path in nodes.shared.iterdir()] == ["bad-nodes.99.0"]
    assert not any("Traceback" in end.err for end in ends)


def test_a_node_that_is_wrong_only_with_others(nodes: Nodes) -> None:
    """Alone it is right, so only pairs can tell; the node is named, but not its partners."""
    only_later = "checks_local._inside = lambda workers, seconds: ('1 process', [])"
    wrong = Node(f"{only_later}\n{nodes.worker(error=2)}")
    first, second, third = nodes.run([Node(), wrong, Node()])
    assert (first.code, second.code, third.code) == (87, 87, 87)
    assert re.match(
        r"across: its all-reduce with host-0, host-2 fails: 1 of \d+ elements",
        shown(first, "host-1"),
    ), first.err
    assert nodes.bad_nodes.read_text() == "host-1\n"
    assert "bad nodes: host-1; host-0 says what is wrong" in third.err


def test_the_shared_folder(nodes: Nodes, tmp_path: Path) -> None:
    """It is read-only on node 0, which is named like any other, and another one on the last."""
    shared = nodes.shared
    # Options of /tmp that a user must not drop.
    read_only = f"mount --bind {shared} {shared} && mount -o remount,bind,ro,nosuid,nodev {shared}"
    other = f"mount -t tmpfs -o size=512m none {shared}"
    wraps = [
        (*mounts.mounting(), "sh", "-ec", f'{how}; exec "$0" "$@"') for how in (read_only, other)
    ]
    ends = nodes.run([Node(wrap=wraps[0]), Node(), Node(), Node(wrap=wraps[1])])
    first = ends[0]
    assert [end.code for end in ends] == [87, 87, 87, 87], first.err
    assert "Read-only file system" in shown(first, "host-0")
    assert shown(first, "host-3").startswith("folder: what it writes to CHECKPOINTS is not seen")
    assert shown(first, "host-1") == shown(first, "host-2") == ""
    # Node 0 cannot write them, so another does.
    assert nodes.bad_nodes.read_text() == "host-0\nhost-3\n"


def test_a_node_that_does_not_come(nodes: Nodes) -> None:
    began = time.monotonic()
    (first,) = nodes.run([Node(), None], PREFLIGHT_SECONDS="45")
    assert first.code == 87
    assert shown(first, "host-1") == "node: it has not come within 45 s"
    assert nodes.bad_nodes.read_text() == "host-1\n"
    assert time.monotonic() - began < 120


@pytest.mark.parametrize("names", ["host-0 host-1", ""])
def test_the_first_node_does_not_come(nodes: Nodes, names: str) -> None:
    (second,) = nodes.run([None, Node()], PREFLIGHT_SECONDS="2", NODES=names)
    assert second.code == 87
    name = "host-0" if names else "node 0"
    assert f"{name}, the first node, at 127.0.0.1:" in second.err
    assert "has not come within 2 s" in second.err and "Traceback" not in second.err
    assert nodes.bad_nodes.exists() == bool(names)
    if names:
        assert nodes.bad_nodes.read_text() == "host-0\n"


def test_a_port_that_is_taken(nodes: Nodes) -> None:
    with socket.create_server(("", 0)) as taken:
        # Outside of the launcher's range, the hub uses the port after MASTER_PORT.
        port = taken.getsockname()[1] - 1
        (first,) = nodes.run([Node(), None], MASTER_PORT=str(port))
    assert first.code == 87
    assert f"port {port + 1} of host-0" in first.err and "Address already in use" in first.err


def test_what_is_asked(nodes: Nodes) -> None:
    (alone,) = nodes.run([Node()], PREFLIGHT="0")
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == "training.preflight: left out, as PREFLIGHT=0 asks\n"
    (alone,) = nodes.run([Node()], PREFLIGHT_SECONDS="soon")
    assert (alone.code, alone.out) == (2, "")
    assert "PREFLIGHT_SECONDS: must be 1 to 86400 seconds, not 'soon'" in alone.err
