"""A line of JSON at a time over TCP, with a limit to every wait."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

LONGEST = 1 << 22
"""Bytes of a line: more is not ours."""


class Wire:
    """A connection to the hub, from the side of a node."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = Lines()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError if the other side is gone."""
        self._socket.sendall(encode(message))

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message. Raises TimeoutError, or ConnectionError if the other side is gone."""
        until = time.monotonic() + seconds
        while True:
            for message in self._lines:
                return message
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the connection was closed")
            self._lines.add(data)

    def close(self) -> None:
        self._socket.close()


class Lines:
    """Messages out of the bytes that come. Iterating takes those that are complete."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> None:
        """Raises ValueError for what is too long to be a message."""
        self._rest += data
        if len(self._rest) > LONGEST:
            raise ValueError("too long")

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> dict[str, Any]:
        """Raises ValueError for a line that is no message."""
        line, end, rest = self._rest.partition(b"\n")
        if not end:
            raise StopIteration
        self._rest = rest
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message")
        return message


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def connect(address: str, port: int, seconds: float) -> Wire:
    """Connect, trying until there is someone. Raises OSError if there is none."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            connection = socket.create_connection((address, port), timeout=max(0.1, min(left, 5)))
            break
        except OSError:
            if time.monotonic() + 0.1 > until:
                raise
            time.sleep(0.1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(connection)
