"""A rendezvous store that counts its requests."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Counted(dist.Store):
    """A store that counts the requests of all stores that share `counts`."""

    def __init__(self, inner: dist.Store, counts: Counter[str]) -> None:
        super().__init__()
        self._inner, self._counts, self._lock = inner, counts, threading.Lock()

    def _count(self, name: str, size: int = 0) -> None:
        with self._lock:
            self._counts[name] += 1
            self._counts["bytes"] += size

    def set(self, key: str, value: Any) -> None:
        self._count("set")
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._count("get", len(value))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._count("wait")
        self._inner.wait(keys, *timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set")
        return self._inner.compare_set(key, expected, desired)
