"""What every process that works for another does about the other's end."""

from __future__ import annotations

import multiprocessing
import os
import threading


def leave_with_parent() -> None:
    """Let this process end as soon as the one that started it is gone, be it by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
