"""What every thread of a process is doing, in lines that a person reads."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

from training.checkpoint.lease import THREAD

WATCHING = "watch"
"""How the names of the watch's own threads begin."""
_OWN = f"{Path(__file__).parents[1]}/"
_PACKAGES = f"{sysconfig.get_path('purelib')}/"
_PLUMBING = (
    *("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_dynamo/eval_frame.py"),
    *("torch/autograd/graph.py", "torch/distributed/c10d_logger.py"),
)
"""Files of torch whose frames stand between two that tell something."""


def own_stacks() -> str:
    """Show the threads of this process that run training's or torch's code, the main one first.

    Of each, the frames of training and torch from the outermost on, and the innermost whatever it
    is. The threads of the watch and of the claim are left out.
    """
    frames = sys._current_frames()
    main = threading.main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    shown = _lines(frames.pop(main.ident))[0] if main.ident in frames else []
    for ident, frame in frames.items():
        if names.get(ident, "").startswith((WATCHING, THREAD)):
            continue
        lines, known = _lines(frame)
        if known:  # one that runs only other code waits for work
            shown += [f"thread {names.get(ident, ident)}:", *lines]
    return "\n".join(shown)


def _lines(innermost: FrameType) -> tuple[list[str], bool]:
    """Give the frames to be shown, the outermost first; whether any is of training or torch."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(innermost))
    summary.reverse()
    lines, found = [], False
    for place, frame in enumerate(summary, 1):
        name = _short(frame.filename)
        known = name.startswith(("training/", "torch/")) and name not in _PLUMBING
        found |= known
        if known or place == len(summary):
            code = f": {frame.line}" if frame.line else ""
            lines.append(f"  {name}:{frame.lineno} in {frame.name}{code}")
    return lines, found


def _short(file: str) -> str:
    if file.startswith(_OWN):
        return f"training/{file.removeprefix(_OWN)}"
    return file.removeprefix(_PACKAGES)
