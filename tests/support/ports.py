"""Ports for a test's servers and jobs, which nothing else takes by chance in the meantime."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(20000, 32000)
"""Below the ports that the kernel assigns to connections and for binding to port 0."""


def free_ports(count: int) -> list[int]:
    """Find ports that nothing listens on now."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = random.choice(PORTS)
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
