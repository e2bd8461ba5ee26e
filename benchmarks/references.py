"""The models that users would train otherwise, built the way their own libraries build them.

Weights are float32 and autocast computes in bfloat16; the loss is torch's cross-entropy of
float32 logits, as in both libraries' own examples.

Shapes: b batch, l length, v vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.convert import hf
from training.models import Mamba2Config, MambaConfig, Sizes

Step = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens and the tokens that follow them, (b, l) each, to the loss, ()."""

Make = Callable[[torch.device], tuple[nn.Module, Step]]


def reference_of(sizes: Sizes, recompute: int, device: torch.device) -> tuple[str, Make] | None:
    """Return the library that users would train with, and how it makes the model; None if missing.

    recompute: every N-th block keeps only its input; 0: none. mamba-ssm runs on GPUs only.
    """
    if not isinstance(sizes, MambaConfig | Mamba2Config):
        return "transformers", functools.partial(_transformers, sizes, recompute)
    if device.type != "cuda" or find_spec("mamba_ssm") is None:
        return None
    return "mamba-ssm", functools.partial(_mamba_ssm, sizes, recompute)


def _transformers(sizes: Sizes, recompute: int, device: torch.device) -> tuple[nn.Module, Step]:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**hf.write(sizes), "use_cache": False}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for index, layer in enumerate(model.model.layers):
            layer.gradient_checkpointing = index % recompute == 0
    return model, functools.partial(_loss, lambda inputs: model(input_ids=inputs).logits, device)


def _mamba_ssm(
    sizes: MambaConfig | Mamba2Config, recompute: int, device: torch.device
) -> tuple[nn.Module, Step]:
    from mamba_ssm.models.config_mamba import MambaConfig as TheirConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    layer = {"ssm_cfg": {"layer": "Mamba2"}} if isinstance(sizes, Mamba2Config) else {}
    config = TheirConfig(
        d_model=sizes.d_model, n_layer=sizes.n_layer, vocab_size=sizes.vocab_size, **layer
    )
    model = MambaLMHeadModel(config, device=device, dtype=torch.float32).train()
    for block in model.backbone.layers[::recompute] if recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model, functools.partial(_loss, lambda inputs: model(inputs).logits, device)


def _loss(
    logits_of: Callable[[Tensor], Any], device: torch.device, inputs: Tensor, targets: Tensor
) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = logits_of(inputs)  # (b, l, v)
    flat = logits.flatten(0, 1).float()  # (b l, v)
    return nn.functional.cross_entropy(flat, targets.flatten())  # ()
