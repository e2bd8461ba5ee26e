"""What this node has, as seen from inside the container."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
from pathlib import Path

from training.errors import TrainingError
from training.job.plan import Job, Node

OUTSIDE = "192.0.2.1"  # RFC 5737: nobody's, so that only the default route leads there
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def look(job: Job) -> Node:
    """Look at this node. Raises TrainingError if the first node's name cannot be resolved."""
    address, interface = "127.0.0.1", ""
    if job.nodes > 1:
        address = _route(job.address)
        interface = _interface(address)
    return Node(
        gpus=_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        cores=len(os.sched_getaffinity(0)),
        address=address,
        interface=interface,
    )


def _gpus(visible: str | None) -> int:
    """Count the GPUs that this task may use: the named ones, else all in /dev."""
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip()])
    return sum(1 for one in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", one.name))


def _route(address: str) -> str:
    """Give this machine's own address on the way to another one. Nothing is sent.

    Where the other one is this machine, by a name that /etc/hosts gives a loopback address as
    Debian does, it is the address on the way out.
    """
    try:
        own = _source(address)
    except OSError as error:
        reason = f"MASTER_ADDR: {address} cannot be reached: {error.strerror}"
        raise TrainingError(reason) from error
    if own.startswith("127.") and not address.startswith("127."):
        with contextlib.suppress(OSError):  # no way out: it stays alone
            return _source(OUTSIDE)
    return own


def _source(address: str) -> str:
    family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _interface(address: str) -> str:
    """Name the network interface that has an IPv4 address; empty if none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
