"""What this node has, as seen from inside the container."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from training.job import affinity, devices, identity, instances, network, software, ulimits
from training.job.facts import Accelerators, Job, Node

HERE = Path("/")
NEURON_TOOLS = "/opt/aws/neuron/bin"


def look(job: Job, environment: Mapping[str, str] = os.environ, root: Path = HERE) -> Node:
    """Look at this node.

    root: where /dev, /sys, /proc and installed software are looked for. Raises TrainingError if the
    first node's name cannot be resolved, and RequestError for an INSTANCE_TYPE that cannot be.
    """
    address, interface = "127.0.0.1", ""
    if job.nodes > 1:
        address = network.route(job.address)
        interface = network.interface(address)
    type, type_why = identity.instance_type(root, environment)
    allowed = os.sched_getaffinity(0)
    return Node(
        cores=len(allowed),
        address=address,
        interface=interface,
        type=type,
        type_why=type_why,
        instance=instances.find(type),
        accelerators=_accelerators(root, environment),
        efa=devices.efa(root),
        domains=affinity.domains(root, allowed),
        limits=ulimits.look(),
        software=software.look(root, environment),
    )


def _accelerators(root: Path, environment: Mapping[str, str]) -> Accelerators:
    """Find the accelerators, whichever kind there is."""
    chips = devices.nodes_of(root, "neuron")
    if chips:
        programs = f"{environment.get('PATH', '')}:{NEURON_TOOLS}"
        return Accelerators(
            kind="neuron",
            seen=chips,
            places=tuple(devices.chips(root, programs)),
            cores=devices.cores_of_chip(root),
        )
    seen, found = devices.nodes_of(root, "nvidia"), devices.gpus(root)
    return Accelerators(
        kind="cuda" if seen else "",
        seen=seen,
        places=tuple(one.numa for one in found),
        uuids=tuple(one.uuid for one in found),
    )
