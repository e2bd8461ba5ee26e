"""How an image comes to all nodes: each reads the file system, or Slurm's sbcast hands it on.

Bytes and seconds; `client` is what one node can read a second, `servers` what all can together.
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def shared_seconds(nodes: int, size: float, client: float, servers: float) -> float:
    """Read `size` bytes on each node, all at once: the slower of one node and the servers."""
    return max(size / client, nodes * size / servers)


def share(starts: Array, size: float, client: float, servers: float) -> Array:
    """Simulate it: when each node that starts at `starts`, sorted, (nodes,), has its bytes.

    All that read get an equal share of the servers, none more than `client`. So they end in the
    order of their starts, and one clock that counts what each reader has got tells when.
    """
    ends = np.empty(len(starts))
    now, got = float(starts[0]), 0.0
    due: list[float] = []  # what `got` is when each reader ends
    first = 0  # of those that read
    while first < len(starts):
        rate = min(client, servers / max(1, len(due) - first))
        end = now + (due[first] - got) / rate if first < len(due) else np.inf
        begin = starts[len(due)] if len(due) < len(starts) else np.inf
        if begin <= end:
            got += rate * (begin - now) if first < len(due) else 0.0
            now = float(begin)
            due.append(got + size)
        else:
            now, got = float(end), due[first]
            ends[first] = now
            first += 1
    return ends


def mounted_rate(read: float, wait: float, flow: float) -> float:
    """Bytes/s of one reader that waits for each read before the next one."""
    return read / (wait + read / flow)


def hops(nodes: int, fanout: int) -> int:
    """Messages from the sender to the farthest of `nodes`, as Slurm divides them.

    Its list is cut into `fanout` parts; the first of each part hands on to the rest of it.
    """
    if nodes <= 0:
        return 0
    return 1 + hops(ceil(nodes / fanout) - 1, fanout)


def depths(nodes: int, fanout: int) -> list[int]:
    """How many hops each of `nodes` is from the sender, in no order; the same division."""
    if nodes <= 0:
        return []
    found = []
    for part in np.array_split(np.arange(nodes), min(fanout, nodes)):
        found += [1, *(1 + depth for depth in depths(len(part) - 1, fanout))]
    return found


def tree_seconds(
    nodes: int, size: float, block: float, fanout: int, flow: float, card: float, hop: float
) -> float:
    """Send `size` bytes by sbcast: block after block, each when all nodes have the one before.

    A node has a block as a whole before it hands it on, to `fanout` nodes at once, each by one
    TCP flow of at most `flow` bytes/s and all of them by one card of `card`.
    """
    one = hop + block / min(flow, card / min(fanout, nodes))
    return ceil(size / block) * hops(nodes, fanout) * one


def tree(
    nodes: int,
    size: float,
    block: float,
    fanout: int,
    flow: float,
    card: float,
    hop: float,
    jitter: float,
    random: np.random.Generator,
) -> float:
    """Simulate it, with hops whose times vary (log-normal, of mean 1); seconds.

    Every block waits for its slowest node: that is what the formula does not see.
    """
    one = hop + block / min(flow, card / min(fanout, nodes))
    blocks = ceil(size / block)
    reached = np.zeros(blocks)  # by the farthest node, each block
    count = np.bincount(depths(nodes, fanout))  # nodes at each depth
    before = np.zeros((blocks, 1))
    for here in count[1:]:
        parents = np.repeat(before, ceil(here / before.shape[1]), axis=1)[:, :here]
        times = random.lognormal(-(jitter**2) / 2, jitter, (blocks, here)) if jitter else 1.0
        before = parents + one * times  # (blocks, nodes of this depth)
        reached = np.maximum(reached, before.max(axis=1))
    return float(reached.sum())
