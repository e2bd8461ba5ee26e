"""Loads torch without searching it for garbage, and so that Ctrl-C can interrupt it.

Python searches for unreachable cycles of objects each time that enough objects were made. While
torch is loaded that finds nothing and takes an eighth of a rank's start; later each full search
takes 0.15 s, in the middle of some step for which all other ranks wait, and so does the one at the
end of the process.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def loading() -> Iterator[None]:
    """Context to load torch and its users in; what exists at its end is never searched again.

    Does nothing if torch was loaded before: the process may have made garbage of its own. Raises
    KeyboardInterrupt at its end for one that was caught inside.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        with _interruptible():
            yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lose no Ctrl-C: modules that try an import catch it, or turn it into another error."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except BaseException:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
