"""Where a rank is: the marks that its steps and blocks leave, and the stacks of its threads."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from training.checkpoint.lease import LEASE_THREAD
from training.models.language import Block
from training.observers.phases import Observer

WATCHING = "watch"
"""Prefix of the names of the watch's own threads."""
_TRAINING = f"{Path(__file__).parents[1]}/"
_PACKAGES = f"{sysconfig.get_path('purelib')}/"
_PLUMBING = (
    *("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_dynamo/eval_frame.py"),
    *("torch/autograd/graph.py", "torch/distributed/c10d_logger.py"),
)
"""Files of torch whose frames only stand between informative ones."""

REMEMBERED = 100
"""How many steps' durations are remembered."""


def own_stacks() -> str:
    """Show the threads of this process that run training's or torch's code, the main one first.

    For each, these are the frames of training and torch, outermost first, and the innermost frame
    whatever it is. The threads of the watch and of the lease are left out.
    """
    frames = sys._current_frames()
    main = threading.main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    shown = _shown_frames(frames.pop(main.ident))[0] if main.ident in frames else []
    for ident, frame in frames.items():
        if names.get(ident, "").startswith((WATCHING, LEASE_THREAD)):
            continue
        lines, known = _shown_frames(frame)
        if known:  # a thread that runs only other code waits for work
            shown += [f"thread {names.get(ident, ident)}:", *lines]
    return "\n".join(shown)


def _shown_frames(innermost: FrameType) -> tuple[list[str], bool]:
    """Return the frames to show, outermost first, and whether any is training's or torch's."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(innermost))
    summary.reverse()
    lines, found = [], False
    for place, frame in enumerate(summary, 1):
        name = _short_path(frame.filename)
        known = name.startswith(("training/", "torch/")) and name not in _PLUMBING
        found |= known
        if known or place == len(summary):
            code = f": {frame.line}" if frame.line else ""
            lines.append(f"  {name}:{frame.lineno} in {frame.name}{code}")
    return lines, found


def _short_path(file: str) -> str:
    if file.startswith(_TRAINING):
        return f"training/{file.removeprefix(_TRAINING)}"
    return file.removeprefix(_PACKAGES)


class Mark(NamedTuple):
    """Where a rank is; of two ranks in one step, the one with the smaller number is behind."""

    step: int
    number: int  # how many marks since the step began
    place: str
    since: float  # time.monotonic()


class Heartbeat(Observer):
    """Keeps this rank's last mark, which the watchdog reads from another thread."""

    def __init__(self, start: int) -> None:
        self.last = Mark(start, 0, "the start", time.monotonic())
        self.phase = ""
        self._open: list[str] = []
        self._began = 0.0
        self._first: float | None = None  # seconds of the first step, which may compile
        self._others: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def longest_step(self) -> float | None:
        """Seconds of the longest recent step; the first step counts only until there is another.

        None before the first step is over.
        """
        return max(self._others) if self._others else self._first

    def begin(self, phase: str) -> None:
        self._open.append(phase)
        self.phase = phase
        if phase == "step":
            self._began = time.monotonic()
            self.last = Mark(self.last.step + 1, 0, phase, self._began)
        else:
            self.mark(phase)

    def end(self, phase: str) -> None:
        self._open.pop()
        self.phase = self._open[-1] if self._open else ""
        self.mark(f"after {phase}")
        if phase == "step":
            taken = self.last.since - self._began
            if self._first is None:
                self._first = taken
            else:
                self._others.append(taken)

    def mark(self, place: str) -> None:
        last = self.last
        self.last = Mark(last.step, last.number + 1, place, time.monotonic())

    def follow(self, model: nn.Module) -> None:
        """Mark every block: forward, where it begins; backward, where its gradients are ready."""
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        for index, block in enumerate(blocks):
            hook = _BlockHook(self, f"block {index} of {len(blocks)}")
            # Before FSDP's hooks: a rank that waits for a block's weights has reached that block.
            block.register_forward_pre_hook(hook.forward, prepend=True)


class _BlockHook:
    """Marks one block of this rank."""

    def __init__(self, heartbeat: Heartbeat, name: str) -> None:
        self._heartbeat, self._name = heartbeat, name

    def forward(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._heartbeat.mark(f"{self._heartbeat.phase}, {self._name}")
        hidden = inputs[0] if inputs else None
        # A hook on the tensor, as one on the module would wrap the block in a function.
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self._heartbeat.mark(f"{self._heartbeat.phase}, past {self._name}")
