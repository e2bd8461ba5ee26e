"""Does what may never return, and gives up on it after a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from training.observers.stacks import WATCHING

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], otherwise: T) -> T:
    """Give what `work` gives, or `otherwise` if that takes longer or fails; it may go on working.

    For a process that is about to end, which a store or a disk that does not answer must not hold.
    """
    given: list[T] = []
    thread = threading.Thread(
        target=lambda: given.append(work()), name=f"{WATCHING}-end", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return given[0] if given else otherwise
