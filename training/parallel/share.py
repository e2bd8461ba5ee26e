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
        """Give this rank's part of so many heads or channels, which `size` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Give tensors that all ranks have alike to a shared part.

        Each rank's gradients are only what its own part makes of them, so they are added up, in
        one call for all the tensors.
        """
        entered: tuple[Tensor, ...] = _Enter.apply(self.group, *tensors)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Add up what the ranks made; the sum is on every rank, and so is its gradient."""
        total: Tensor = _Leave.apply(self.group, x)  # the shape of x
        return total

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Add up over the ranks, or take another operation, in place; without gradients."""
        dist.all_reduce(x, op=op, group=self.group)
        return x

    def mean(self, groups: int) -> tuple[int, Callable[[Tensor], Tensor] | None]:
        """Tell how channels in so many groups are normalised, whose ranks have equal parts.

        Gives the groups of this rank, and how a mean over its channels of one becomes that over
        all of them, where other ranks have channels of it too. Of groups and ranks one divides the
        other.
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

    The operations compute with plain tensors, so a parameter that FSDP has gathered is given as
    this rank's part of it. One that is sharded is given as it is: FSDP itself asks for those.
    """

    share: Share

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, compat.DTensor) and value.device_mesh.ndim == 1:
            return value.to_local()  # its part
        return value
