"""Checks of the kernels' arguments, before a kernel is compiled."""

# ruff: noqa: N803  (A, B, C, D are the paper's own names)
from __future__ import annotations

import torch
from torch import Tensor

from training.errors import RequestError
from training.ops.nki.limits import CHUNK, GROUP_CHANNELS, MOVING, PARTITIONS, STATE

DTYPES = (torch.float32, torch.bfloat16)


def check_ssd(x: Tensor, B: Tensor, C: Tensor) -> None:
    """Raise RequestError if the kernels cannot take x (b, l, h, p) or B, C (b, l, g, n)."""
    length, heads, p = x.shape[1:]
    groups, n = B.shape[2:]
    faults = [_dtype("x", x), _dtype("B", B), _dtype("C", C)]
    if length % CHUNK:
        faults.append(f"the length is {length}; it must be a multiple of {CHUNK}")
    if n != STATE:
        faults.append(f"the state size is {n}; it must be {STATE}")
    if p > PARTITIONS:
        faults.append(f"a head has {p} channels; it may have {PARTITIONS}")
    if heads % groups:
        faults.append(f"{heads} heads cannot be shared out to {groups} groups")
    elif heads // groups > MOVING:
        faults.append(f"a group has {heads // groups} heads; it may have {MOVING}")
    elif heads // groups * p > GROUP_CHANNELS:
        faults.append(f"a group has {heads // groups * p} channels; it may have {GROUP_CHANNELS}")
    _raise("SSD", faults)


def check_conv(x: Tensor, weight: Tensor) -> None:
    """Raise RequestError if the kernels cannot take x (b, l, d) or weight (d, 1, k)."""
    channels = x.shape[2]
    faults = [_dtype("x", x), _dtype("the weight", weight)]
    if channels % PARTITIONS:
        faults.append(f"there are {channels} channels; they must be a multiple of {PARTITIONS}")
    if weight.shape[:2] != (channels, 1):
        faults.append(f"the weight is {tuple(weight.shape)}; it must be ({channels}, 1, taps)")
    _raise("the convolution", faults)


def _dtype(name: str, tensor: Tensor) -> str:
    return (
        ""
        if tensor.dtype in DTYPES
        else f"{name} is {tensor.dtype}; it must be float32 or bfloat16"
    )


def _raise(what: str, faults: list[str]) -> None:
    found = [f"NKI, {what}: {fault}" for fault in faults if fault]
    if found:
        raise RequestError.of(found)
