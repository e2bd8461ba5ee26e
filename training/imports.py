"""How torch is loaded: without looking for garbage among what is loaded.

Python looks for cycles of objects that nothing refers to each time that enough objects were made.
While torch is loaded that finds nothing and takes an eighth of a rank's start; later each whole
search takes 0.15 s, in the middle of some step for which all other ranks wait; and so does the one
at the end of the process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Load torch and what uses it within this; whatever there is then is never looked at again.

    Does nothing where torch was loaded before: the process may have made garbage of its own.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
