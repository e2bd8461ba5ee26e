"""How far a rank has come: a mark at the beginning and end of every part of a step, and a block.

A mark is a tuple made without asking the device for anything: well under a microsecond each.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from torch import Tensor, nn

from training.models.language import Block
from training.observers.phases import Observer

REMEMBERED = 100
"""Steps whose durations are remembered."""


class Mark(NamedTuple):
    """Where a rank is; of two ranks in one step, the one with the smaller number is behind."""

    step: int
    number: int  # of marks since the step began
    place: str
    since: float  # time.monotonic()


class Marks(Observer):
    """Keeps this rank's mark; the watch reads it from another thread."""

    def __init__(self, start: int) -> None:
        self.last = Mark(start, 0, "the start", time.monotonic())
        self.phase = ""
        self._open: list[str] = []
        self._began = 0.0
        self._first: float | None = None  # seconds of the first step, which may compile
        self._others: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def longest_step(self) -> float | None:
        """Seconds of the longest of the last steps; the first counts only until there is another.

        None before a step was taken.
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
        """Mark where every block begins, forward, and where its gradients are ready, backward."""
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        for index, block in enumerate(blocks):
            hook = _BlockHook(self, f"block {index} of {len(blocks)}")
            # Before what FSDP hooks in: a rank that waits for a block's weights has come so far.
            block.register_forward_pre_hook(hook.forward, prepend=True)


class _BlockHook:
    """Marks one block of this rank."""

    def __init__(self, marks: Marks, name: str) -> None:
        self._marks, self._name = marks, name

    def forward(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._marks.mark(f"{self._marks.phase}, {self._name}")
        hidden = inputs[0] if inputs else None
        # A hook of the tensor, not of the module, which would put a function around the block.
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self._marks.mark(f"{self._marks.phase}, past {self._name}")
