"""How FSDP cuts the experts of a layer, which are one tensor: by experts, or through each of them.

By experts (its own way) the ranks have parts of one size only where their number divides that of
the experts; with more ranks than experts the rest would have nothing, and the others more.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from training import compat
from training.models.mixtral import Experts


def placements(model: nn.Module, ranks: int) -> dict[nn.Parameter, Any]:
    """Tell which parameters of the experts are cut through each expert, and how.

    A dimension that the ranks can share evenly is taken, one that the tensor group has not cut
    before another. Where there is none, they are cut by experts.
    """
    found = {}
    for module in model.modules():
        for parameter in module.parameters() if isinstance(module, Experts) else ():
            fitting = [
                dim
                for dim in sorted((1, 2), key=lambda dim: dim in _cut(parameter))
                if _local(parameter).shape[dim] % ranks == 0
            ]
            if parameter.shape[0] % ranks and fitting:
                found[parameter] = compat.Shard(fitting[0])
    return found


def _local(parameter: Any) -> Any:
    """Give what of a parameter the tensor group has left to FSDP."""
    return parameter.to_local() if isinstance(parameter, compat.DTensor) else parameter


def _cut(parameter: Any) -> list[int]:
    """Tell which dimensions the tensor group has cut."""
    placed = parameter.placements if isinstance(parameter, compat.DTensor) else ()
    return [one.dim for one in placed if isinstance(one, compat.Shard)]
