"""Choose the implementation of an operation: the first that can run, or the one that is forced.

TRAINING_OPS forces implementations, as in `selective_scan=torch,attention=sdpa`. The choice is
logged once for each operation.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.errors import RequestError

VARIABLE = "TRAINING_OPS"
NAMES = (
    "attention",
    "causal_conv1d",
    "gated_rms_norm",
    "rms_norm",
    "route",
    "selective_scan",
    "ssd",
)

IN_PIECES = " with context_parallel"
"""`Choice.when` of operations that take a part of a sequence and pass on their state."""

log = logging.getLogger("training.ops")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation.

    `unfit` returns why it cannot take a tensor like this one, or an empty string; `module` must
    be importable, and is imported only for a tensor that fits.
    """

    name: str
    run: Callable[..., Any]
    module: str = ""
    unfit: Callable[[Tensor], str] = lambda like: ""

    def obstacle(self, like: Tensor) -> str:
        """Return why it cannot run; empty if it can."""
        return self.unfit(like) or (absent(self.module) if self.module else "")


class Choice:
    """An operation's implementations, best first; the last one takes everything.

    `when` says, for an error, in which case only these exist.
    """

    def __init__(
        self, name: str, implementations: Sequence[Implementation], when: str = ""
    ) -> None:
        assert name in NAMES
        self.name, self.when = name, when
        self.implementations = {one.name: one for one in implementations}
        self._chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, like: Tensor) -> Callable[..., Any]:
        """Choose for a tensor like this one. Raises RequestError if a forced one cannot run."""
        forced = os.environ.get(VARIABLE, "")
        key = (forced, like.device.type, like.dtype)
        run = self._chosen.get(key)
        if run is None:
            chosen = self._choose(like, forced)
            log.info("%s: %s on %s, %s", self.name, chosen.name, like.device.type, like.dtype)
            run = self._chosen[key] = _opaque(chosen.run) if _hidden else chosen.run
        return run

    def _choose(self, like: Tensor, forced: str) -> Implementation:
        wanted = parse(forced).get(self.name)
        if wanted is None:
            fitting = (one for one in self.implementations.values() if not one.obstacle(like))
            return next(fitting)
        chosen = self.implementations.get(wanted)
        if chosen is None:
            known = ", ".join(self.implementations)
            raise RequestError(
                f"{VARIABLE}: {self.name} has no {wanted!r}{self.when} (there is {known})"
            )
        obstacle = chosen.obstacle(like)
        if obstacle:
            raise RequestError(f"{VARIABLE}: {self.name}={wanted} cannot run: {obstacle}")
        return chosen


_hidden = False


def hide_from_compiler() -> None:
    """Hide the implementations from torch.compile, which would unroll their loops."""
    global _hidden
    if not _hidden:
        _hidden = True
        Choice.__call__ = _opaque(Choice.__call__)  # type: ignore[method-assign]


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    hidden: Callable[..., Any] = torch.compiler.disable(function)
    return hidden


@functools.lru_cache
def parse(forced: str) -> dict[str, str]:
    """Read `op=implementation,...`. Raises RequestError for an unknown operation."""
    pairs = {}
    for word in filter(None, forced.split(",")):
        name, separator, wanted = (part.strip() for part in word.partition("="))
        if name not in NAMES or not separator:
            known = ", ".join(NAMES)
            raise RequestError(f"{VARIABLE}: {word!r} is not OPERATION=WAY (operations: {known})")
        pairs[name] = wanted
    return pairs


def on_gpu(like: Tensor) -> str:
    """Return why a tensor does not fit: it is not on a GPU. Empty if it fits, as below."""
    return "" if like.is_cuda else f"it needs a GPU, but the tensors are on {like.device.type}"


def on_gpu_at_most_float32(like: Tensor) -> str:
    """Return why a tensor does not fit: it is not on a GPU, or is float64."""
    wide = "it computes in float32, but the tensors are float64"
    return on_gpu(like) or (wide if like.dtype == torch.float64 else "")


def on_neuron(like: Tensor) -> str:
    """Return why a tensor does not fit: it is not on a Neuron device (XLA's device with NKI)."""
    where = like.device.type
    return "" if where == "xla" else f"it needs a Neuron device, but the tensors are on {where}"


@functools.lru_cache
def absent(module: str) -> str:
    """Return why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # compiled extensions fail in many ways
        return f"{module} cannot be imported: {error}"
    return ""
