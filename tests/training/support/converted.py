"""Small models of transformers and of ours, to convert and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
)

from training.convert.__main__ import convert
from training.convert.source import Source, load

TINY: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**TINY, "intermediate_size": 48, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**HEADS, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MAMBA2 = {**TINY, "state_size": 8, "num_heads": 4, "head_dim": 16, "chunk_size": 8}
BAMBA: dict[str, Any] = {
    **{**GROUPED, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "pad_token_id": None,
}
NEMOTRON: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": None},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10},
    **{"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2},
}

CONFIGS: dict[str, Any] = {
    "mamba": lambda: MambaConfig(**TINY, state_size=4),
    "mamba untied, biased": lambda: MambaConfig(
        **TINY, tie_word_embeddings=False, use_bias=True, use_conv_bias=False, expand=3
    ),
    "mamba2": lambda: Mamba2Config(**MAMBA2, n_groups=1, tie_word_embeddings=True),
    "mamba2 of two groups": lambda: Mamba2Config(**MAMBA2, n_groups=2, use_bias=True),
    "llama": lambda: LlamaConfig(**GROUPED),
    "llama tied, biased": lambda: LlamaConfig(
        **HEADS, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama llama3": lambda: LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "llama linear": lambda: LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=5),
    "mistral without a window": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=3),
    "gpt_neox": lambda: GPTNeoXConfig(**HEADS),
    "gpt_neox otherwise": lambda: GPTNeoXConfig(
        **HEADS,
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "bamba": lambda: BambaConfig(**BAMBA, attn_layer_indices=[1]),
    "bamba otherwise": lambda: BambaConfig(
        **BAMBA,
        attn_layer_indices=[0],
        tie_word_embeddings=True,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        time_step_limit=[0.01, 0.5],
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **BAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=3,
        shared_intermediate_size=24,
        embedding_multiplier=3,
        residual_multiplier=0.4,
        attention_multiplier=0.125,
        logits_scaling=2,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid without experts": lambda: GraniteMoeHybridConfig(
        **BAMBA,
        layer_types=["attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        attention_multiplier=0.3,
        position_embedding_type="rope",
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **NEMOTRON, layers_block_type=["mamba", "mlp", "attention", "mamba"]
    ),
    "nemotron_h by letters": lambda: NemotronHConfig(
        **{**NEMOTRON, "hybrid_override_pattern": "*M-"}, use_bias=True, mlp_bias=True
    ),
}


def reference(name: str, seed: int = 0) -> nn.Module:
    """Make a transformers model whose parameters are all random, norms and biases too."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def saved(model: nn.Module, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return folder


def theirs(folder: Path, **options: Any) -> nn.Module:
    """Load a model with transformers, strictly: by default it only warns of misfitting tensors."""
    read: Any = AutoModelForCausalLM.from_pretrained
    model, shown = read(folder, attn_implementation="eager", output_loading_info=True, **options)
    assert not any(shown.values()), shown
    result: nn.Module = model.eval()
    return result


def ours(form: str, folder: Path) -> nn.Module:
    return load(Source.open(form, folder), torch.device("cpu"), torch.float32)


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(40, (2, 19), generator=torch.Generator().manual_seed(5))  # (b, l)
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits  # (b, l, v)


def run(*words: Any) -> None:
    convert([str(word) for word in words])


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for path in folder.glob("*.bin"):
        found |= torch.load(path, weights_only=True)
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=0, msg=name)
