"""The image on its way to all nodes: formulas beside the simulation."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scale import staging

GB = 1e9


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
    assert staging.tree(*tree, 0.0, np.random.default_rng(7)) == pytest.approx(formula)
    assert formula < staging.tree(*tree, 0.5, np.random.default_rng(7)) < 3 * formula


def test_a_slow_card_is_shared_by_the_fan_out() -> None:
    seconds = staging.tree_seconds(8, GB, 1e6, 8, GB, 2 * GB, 0.0)
    assert seconds == pytest.approx(4.0)
