"""Where a number that is none first comes from: which module, going forward or back, on what batch.

Looking at every module's output makes a device wait, so this is for a run that has failed: started
again it goes on from the last checkpoint, repeats the same steps, and fails with names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training import compat
from training.errors import TrainingError


def trace(model: nn.Module, where: Callable[[], str]) -> None:
    """Let every module's output be looked at; `where` tells the step and the batch.

    The first that is not finite raises TrainingError.
    """

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for one in output if isinstance(output, tuple) else (output,):
                if isinstance(one, Tensor) and not is_finite(one):
                    raise _lost(
                        f"{name or 'the model'} ({type(module).__name__}) gives", one, where()
                    )

        return look

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))


def look_at_gradients(model: nn.Module, where: Callable[[], str]) -> None:
    """Raise TrainingError naming the first parameter, going back, whose gradient is not finite."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not is_finite(parameter.grad):
            raise _lost(f"the gradient of {name} has", parameter.grad, where())


def is_finite(x: Tensor) -> bool:
    """Whether all of a tensor, or of this rank's part of it, is numbers."""
    part = x.to_local() if isinstance(x, compat.DTensor) else x
    return bool(torch.isfinite(part).all())


def _lost(what: str, x: Tensor, where: str) -> TrainingError:
    part = x.to_local() if isinstance(x, compat.DTensor) else x
    nans, infinite = int(part.isnan().sum()), int(part.isinf().sum())
    return TrainingError(f"{where}: {what} {nans} NaN and {infinite} Inf", local=True)
