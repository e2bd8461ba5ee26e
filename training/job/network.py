"""A node's own address and network interface, as the other nodes reach it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from training.errors import TrainingError

OUTSIDE = "192.0.2.1"  # RFC 5737: nobody's, so that only the default route leads there
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def route(address: str) -> str:
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


def interface(address: str) -> str:
    """Name the network interface that has an IPv4 address; empty if none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
