"""What a node is, in the first lines of the block."""

from __future__ import annotations

from training.job.facts import Node
from training.job.types import Decision, count


def told(node: Node, cards: int) -> list[Decision]:
    """Tell the instance, its accelerators and its network, of which `cards` are for EFA."""
    why = node.type_why
    if node.instance is None:
        why += "; not in the table: what is seen counts" if node.type else ""
        found = [Decision("instance", node.type or "none of EC2's", why)]
        found += [Decision("EFA", count(cards, "card"), "as seen")] if cards else []
    else:
        chip, fabric = node.instance.chip, node.instance.fabric
        path = "GPUDirect RDMA" if fabric.rdma and not chip.cores else ""
        path = path or ("RDMA" if fabric.rdma else "through the host's memory")
        protocol = f", protocol {fabric.protocol}" if fabric.protocol else ""
        network = f"{fabric.gbits:g} Gbit/s"
        found = [
            Decision("instance", node.type, why),
            Decision(
                "accelerators",
                f"{node.instance.count} x {chip.name}",
                f"{chip.memory / 1024:.0f} GiB each",
            ),
            Decision(
                "EFA",
                count(cards, "card") if cards else "none",
                f"{network}, {path}{protocol}" if cards else f"{network} by TCP",
            ),
        ]
    software = node.software.told()
    return found + ([Decision("software", "for EFA", software)] if cards and software else [])
