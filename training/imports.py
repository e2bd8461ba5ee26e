"""How torch is loaded: without looking for garbage among what is loaded, and to be interrupted.

Python looks for cycles of objects that nothing refers to each time that enough objects were made.
While torch is loaded that finds nothing and takes an eighth of a rank's start; later each whole
search takes 0.15 s, in the middle of some step for which all other ranks wait; and so does the one
at the end of the process.
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
    """Load torch and what uses it within this; whatever there is then is never looked at again.

    Does nothing where torch was loaded before: the process may have made garbage of its own.
    Raises KeyboardInterrupt at its end for one that was caught within it.
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
    """Let no Ctrl-C be lost: modules that try an import catch it, or make another error of it."""
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
