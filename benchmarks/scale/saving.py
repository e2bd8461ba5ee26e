"""What a checkpoint costs: bytes, files, and rank 0's list of who has what. Bytes and seconds."""

from __future__ import annotations


def stall_seconds(size: float, ranks: int, copy: float) -> float:
    """Training stands still while each rank copies its part into the host's memory."""
    return size / ranks / copy


def writing_seconds(
    size: float, nodes: int, ranks: int, node: float, disks: float, checksum: float, creates: float
) -> float:
    """Write a file a rank, make that many entries in one folder, read each back for its checksum.

    `node` and `disks` are bytes/s of a node and of the file system, `checksum` of a rank, and
    `creates` files/s.
    """
    return size / min(nodes * node, disks) + size / ranks / checksum + ranks / creates


def loading_seconds(size: float, nodes: int, client: float, disks: float) -> float:
    """Read it twice: once for the checksums, once to load it."""
    return 2 * size / min(nodes * client, disks)


def entries(tensors: int, shards: int) -> int:
    """Count the entries of .metadata: of weights and two moments, one a shard."""
    return 3 * tensors * shards
