"""A tensor group: the ranks that share the work of each layer, and how tensors pass between them.

Outside a shared part every rank of the group holds the same stream. `enter` leads into the part,
where each rank computes with its own heads or channels; `leave` leads out, by their sum. Each is
the other's backward pass (Shoeybi et al. 2019, "Megatron-LM", section 3: f and g).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training import compat


@dataclass(frozen=True)
class Share:
    """One rank's place in its tensor group."""

    rank: int
    size: int
    group: Any  # a process group

    def own(self, count: int) -> slice:
        """Return this rank's part of `count` heads or channels, which `size` must divide."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pass tensors that are equal on all ranks into a shared part.

        A rank's gradients come only from its own part, so they are summed over the ranks, in one
        call for all the tensors.
        """
        entered: tuple[Tensor, ...] = _Enter.apply(self.group, *tensors)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Sum what the ranks computed; the sum is on every rank, and so is its gradient."""
        total: Tensor = _Leave.apply(self.group, x)  # the shape of x
        return total

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks, by sum or another operation, in place; without gradients."""
        dist.all_reduce(x, op=op, group=self.group)
        return x

    def mean(self, groups: int) -> tuple[int, Callable[[Tensor], Tensor] | None]:
        """Return how to normalize channels in `groups` groups, of which ranks have equal parts.

        Returns the number of this rank's groups and, if other ranks have channels of the same
        group, a function from the mean over this rank's channels of it to the mean over all of
        them. The number of groups must divide that of ranks, or the reverse.
        """
        if groups % self.size == 0:
            return groups // self.size, None
        each = self.size // groups  # ranks of one group of channels

        def mean(own: Tensor) -> Tensor:
            """(..., 1, 1) -> (..., 1, 1)."""
            sums = own.new_zeros(*own.shape[:-1], groups)  # (..., 1, groups)
            at = slice(self.rank // each, self.rank // each + 1)
            sums[..., at] = own / each  # (..., 1, 1)
            return self.sum(sums)[..., at]  # (..., 1, 1)

        return 1, mean


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.group = group
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        flat = torch.cat([one.flatten() for one in gradients])  # (all their elements,)
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([one.numel() for one in gradients])  # (an input's elements,) each
        summed = (
            part.view(one.shape).to(one.dtype) for part, one in zip(parts, gradients, strict=True)
        )
        return (None, *summed)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        total = x.clone(memory_format=torch.contiguous_format)  # the shape of x
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


class Shared(nn.Module):
    """Mixed into a module whose parameters are DTensors of a tensor group.

    Operations compute with plain tensors, so a parameter that FSDP has gathered is returned as this
    rank's part of it. A sharded one is returned as it is, since it is FSDP itself that asks for it.
    """

    share: Share

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, compat.DTensor) and value.device_mesh.ndim == 1:
            return value.to_local()  # its part
        return value
