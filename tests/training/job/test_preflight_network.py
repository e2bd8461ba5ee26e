"""Preflight of nodes with their own networks, some links of which are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_namespaces import Bridge, bridged
from tests.support.preflight_nodes import Ended, Node, Nodes

pytestmark = pytest.mark.processes


@pytest.fixture
def links(as_root: None) -> Iterator[Bridge]:
    with bridged(["no-such-name"] * 3) as bridge:
        yield bridge


def run(root: Path, folder: Path, links: Bridge, seconds: str) -> tuple[Nodes, list[Ended]]:
    """Run a node on each machine, with host names that cannot be resolved."""
    nodes = Nodes(root, folder)
    wrapped = [Node(wrap=tuple(machine.enter())) for machine in links.machines]
    first = links.machines[0].address
    return nodes, nodes.run(wrapped, MASTER_ADDR=first, PREFLIGHT_SECONDS=seconds)


def test_a_link_between_two_that_are_well_with_the_third(
    root: Path, tmp_path: Path, links: Bridge
) -> None:
    links.part(1, 2)
    nodes, ends = run(root, tmp_path, links, "60")
    assert [end.code for end in ends] == [87, 87, 87]
    assert "\n  across: host-1 and host-2 fail to compute together (" in ends[0].err
    assert "though each does with others: the link between them" in ends[0].err
    # Neither is excluded: it may be the other's fault.
    assert not nodes.bad_nodes.exists()
    assert "none that can be named; host-0 says what is wrong" in ends[1].err


def test_a_node_without_its_link_to_the_first(root: Path, tmp_path: Path, links: Bridge) -> None:
    """Node 0 names it; it does not blame node 0, whose file it sees."""
    links.part(0, 2)
    nodes, ends = run(root, tmp_path, links, "60")
    assert [end.code for end in ends] == [87, 87, 87]
    assert "\n  host-2: node: it has not come within 60 s" in ends[0].err
    assert nodes.bad_nodes.read_text() == "host-2\n"
    assert f"host-0, the first node, at {links.machines[0].address}:" in ends[2].err
