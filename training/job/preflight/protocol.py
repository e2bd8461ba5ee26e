"""How the nodes talk with node 0: one line of JSON at a time over TCP, every wait limited."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

LONGEST = 1 << 22
"""Bytes of a line: a longer one does not come from this program."""

SENDING = 5.0
"""Seconds for a node to take a message; it does nothing but wait for one."""


class Wire:
    """A node's connection to the hub."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = Lines()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError if the other side is gone."""
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
    """Splits received bytes into messages. Iterating takes those that are complete."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> None:
        """Add received bytes. Raises ValueError if they are too long for a message."""
        self._rest += data
        if len(self._rest) > LONGEST:
            raise ValueError("too long")

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> dict[str, Any]:
        """Take the next complete message. Raises ValueError for a line that is not one."""
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
    """Connect, retrying until somebody listens. Raises OSError if nobody does in time."""
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


@dataclass(frozen=True)
class Answer:
    """A node's answer, and when it arrived (time.monotonic())."""

    value: dict[str, Any]
    at: float


@dataclass
class _Caller:
    socket: socket.socket
    lines: Lines = field(default_factory=Lines)
    rank: int | None = None  # None until it has said who it is


class Hub:
    """Sends messages to the nodes and gathers their answers. For use by one thread."""

    def __init__(self, port: int, run_id: str, nodes: int, welcome: dict[str, Any]) -> None:
        """Listen at `port`; every node that connects is sent `welcome`. Raises OSError if taken."""
        self._run_id, self._nodes, self._welcome = run_id, nodes, welcome
        self._callers: dict[int, _Caller] = {}
        self._answers: dict[int, Answer] = {}
        self._round = 0
        self.lost: set[int] = set()  # connected, and went before the end
        self._server = socket.create_server(("", port), backlog=max(128, nodes))
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    @property
    def came(self) -> set[int]:
        """The nodes that have said who they are."""
        return {*self._callers, *self.lost}

    def ask(self, messages: dict[int, dict[str, Any]]) -> None:
        """Send each node its message. Answers to earlier messages no longer count."""
        self._round += 1
        self._answers.clear()
        for rank, message in messages.items():
            caller = self._callers.get(rank)
            if caller is not None:
                self._send(caller, {**message, "round": self._round})

    def gather(self, ranks: Iterable[int], seconds: float) -> dict[int, Answer]:
        """Wait for an answer of each node; return those that came in time."""
        wanted = set(ranks)
        until = time.monotonic() + seconds
        while not wanted <= self._answers.keys() | self.lost:
            left = until - time.monotonic()
            if left <= 0:
                break
            for key, _ in self._selector.select(left):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._hear(key.data)
        return {rank: self._answers[rank] for rank in sorted(wanted & self._answers.keys())}

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller is gone again
            connection, _ = self._server.accept()
            connection.settimeout(SENDING)
            self._selector.register(connection, selectors.EVENT_READ, _Caller(connection))

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.socket.recv(1 << 16)
            if not data:
                raise ConnectionError
            caller.lines.add(data)
            for message in caller.lines:
                self._take(caller, message)
        except (OSError, ValueError):
            self._drop(caller)

    def _take(self, caller: _Caller, message: dict[str, Any]) -> None:
        if caller.rank is None:
            self._greet(caller, message)
        elif message.get("round") == self._round:
            self._answers[caller.rank] = Answer(message, time.monotonic())

    def _greet(self, caller: _Caller, message: dict[str, Any]) -> None:
        rank, run_id = message.get("rank"), message.get("run")
        if run_id != self._run_id:
            fault = f"this is {self._run_id}, not {run_id}"
        elif not isinstance(rank, int) or not 0 <= rank < self._nodes:
            fault = f"there is no node {rank} among {self._nodes}"
        elif rank in self._callers:
            fault = f"there is a node {rank} already"
        else:
            caller.rank = rank
            self._callers[rank] = caller
            self.lost.discard(rank)
            self._send(caller, {**self._welcome, "round": self._round})
            return
        self._send(caller, {"refused": fault})
        self._drop(caller)

    def _send(self, caller: _Caller, message: dict[str, Any]) -> None:
        try:
            caller.socket.sendall(encode(message))
        except OSError:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        with contextlib.suppress(KeyError):  # dropped already
            self._selector.unregister(caller.socket)
        caller.socket.close()
        if caller.rank is not None and caller.rank in self._callers:
            del self._callers[caller.rank]
            self.lost.add(caller.rank)
