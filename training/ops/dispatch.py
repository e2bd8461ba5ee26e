"""Which implementation of an operation runs: the first that can, or the one that is forced.

TRAINING_OPS forces, as `selective_scan=torch,attention=sdpa`. What runs is logged once for each
operation.
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
"""When an operation takes a part of a sequence and hands its state on."""

log = logging.getLogger("training.ops")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation.

    `unfit` tells why it cannot take a tensor like this one, or says nothing; `module` must be there
    to be imported, and is imported only for a tensor that fits.
    """

    name: str
    run: Callable[..., Any]
    module: str = ""
    unfit: Callable[[Tensor], str] = lambda like: ""

    def obstacle(self, like: Tensor) -> str:
        """Tell why it cannot run; an empty word where it can."""
        return self.unfit(like) or (absent(self.module) if self.module else "")


class Choice:
    """An operation's implementations, the best first; the last one takes everything.

    `when` says, for an error, when only these are there.
    """

    def __init__(
        self, name: str, implementations: Sequence[Implementation], when: str = ""
    ) -> None:
        assert name in NAMES
        self.name, self.when = name, when
        self.implementations = {one.name: one for one in implementations}
        self._chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, like: Tensor) -> Callable[..., Any]:
        """Choose for a tensor like this one. Raises RequestError for a forced one that cannot."""
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
    """Let torch.compile go around the implementations, whose loops it would unroll."""
    global _hidden
    if not _hidden:
        _hidden = True
        Choice.__call__ = _opaque(Choice.__call__)  # type: ignore[method-assign]


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    hidden: Callable[..., Any] = torch.compiler.disable(function)
    return hidden


@functools.lru_cache
def parse(forced: str) -> dict[str, str]:
    """Read `op=implementation,...`. Raises RequestError for an operation that there is not."""
    pairs = {}
    for word in filter(None, forced.split(",")):
        name, separator, wanted = (part.strip() for part in word.partition("="))
        if name not in NAMES or not separator:
            known = ", ".join(NAMES)
            raise RequestError(f"{VARIABLE}: {word!r} is not OPERATION=WAY (operations: {known})")
        pairs[name] = wanted
    return pairs


def on_gpu(like: Tensor) -> str:
    """Tell that a tensor is not on a GPU."""
    return "" if like.is_cuda else f"it needs a GPU, and the tensors are on {like.device.type}"


def on_gpu_at_most_float32(like: Tensor) -> str:
    """Tell that a tensor is not on a GPU, or that it is wider."""
    wide = "it computes in float32, and the tensors are float64"
    return on_gpu(like) or (wide if like.dtype == torch.float64 else "")


def on_neuron(like: Tensor) -> str:
    """Tell that a tensor is not on a Neuron device, which XLA's device is where NKI is."""
    where = like.device.type
    return "" if where == "xla" else f"it needs a Neuron device, and the tensors are on {where}"


@functools.lru_cache
def absent(module: str) -> str:
    """Tell why a module cannot be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # compiled extensions fail in many ways
        return f"{module} cannot be imported: {error}"
    return ""
