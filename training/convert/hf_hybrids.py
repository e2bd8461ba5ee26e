"""Hugging Face's settings of the hybrids, and our sizes. No torch here.

Each family states the kinds of its layers in its own way: Bamba lists the layers with attention,
Granite names the kind of every layer, Nemotron-H does so or has a letter for each. Our sizes have
the pattern of training.models.hybrid_sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from training.convert.config import are_numbers, is_one_of, read_limit
from training.errors import RequestError
from training.models import BambaConfig, GraniteHybridConfig, HybridConfig, NemotronHConfig
from training.models.hybrid_sizes import ATTENTION, MAMBA, MLP

Settings = dict[str, Any]

ARCHITECTURES = {
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}

_ALL = {
    "d_model": "hidden_size",
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "context": "max_position_embeddings",
    "residual_in_fp32": "residual_in_fp32",
}
_BAMBA = {
    **_ALL,
    "n_layer": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "n_mamba_head": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "d_state": "mamba_d_state",
    "d_conv": "mamba_d_conv",
    "n_groups": "mamba_n_groups",
    "chunk_size": "mamba_chunk_size",
    "bias": "mamba_proj_bias",
    "conv_bias": "mamba_conv_bias",
}
NAMES: dict[str, dict[str, str]] = {
    "bamba": {**_BAMBA, "d_ff": "intermediate_size", "mlp_bias": "mlp_bias"},
    "granitemoehybrid": {
        **_BAMBA,
        "d_ff": "shared_intermediate_size",
        "n_expert": "num_local_experts",
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "logits_scaling": "logits_scaling",
    },
    "nemotron_h": {
        **_ALL,
        "norm_eps": "layer_norm_epsilon",
        "d_ff": "intermediate_size",
        "mlp_bias": "mlp_bias",
        "n_mamba_head": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "d_state": "ssm_state_size",
        "d_conv": "conv_kernel",
        "n_groups": "n_groups",
        "chunk_size": "chunk_size",
        "bias": "use_bias",
        "conv_bias": "use_conv_bias",
        "dt_limit_low": "time_step_min",
    },
}
"""Family -> our names -> theirs, for settings that mean the same in both."""

_ABSENT_ALL: Settings = {"initializer_range": 0.02, "tie_word_embeddings": False}
_ABSENT_BAMBA: Settings = {
    **_ABSENT_ALL,
    "head_dim": None,
    "residual_in_fp32": True,
    "attention_bias": False,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "num_attention_heads": 32,
}
ABSENT: dict[str, Settings] = {
    "bamba": {
        **_ABSENT_BAMBA,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
        "max_position_embeddings": 262144,
    },
    "granitemoehybrid": {
        **_ABSENT_BAMBA,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 11008,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "nemotron_h": {
        **_ABSENT_ALL,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "residual_in_fp32": False,
        "layer_norm_epsilon": 1e-5,
        "intermediate_size": 21504,
        "mlp_bias": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "chunk_size": 128,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_min": 1e-3,
    },
}
"""What transformers takes for a missing setting."""

_KINDS = {"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": MLP, "moe": "E"}
_KINDS |= {"mamba": MAMBA, "attention": ATTENTION}  # before transformers 5
_WRITTEN = {MAMBA: "mamba", ATTENTION: "attention"}
"""The old names, which transformers 5 reads too."""


def _read_bamba(given: Settings, rope: Settings, values: Settings, faults: list[str]) -> None:
    where, layers = given.get("attn_layer_indices") or [], given.get("num_hidden_layers")
    if not isinstance(where, list) or any(type(one) is not int for one in where):
        faults.append(f"attn_layer_indices must be a list of whole numbers, not {where!r}")
    elif type(layers) is int:  # `make` reports what is no number
        values["pattern"] = "".join(ATTENTION if n in where else MAMBA for n in range(layers))
    _read_common(given, rope, values, faults)
    factor = rope.get("partial_rotary_factor", 0.5)
    if factor != 0.5:
        faults.append(f"partial_rotary_factor {factor}: bamba rotates half of a head")


def _read_granite(given: Settings, rope: Settings, values: Settings, faults: list[str]) -> None:
    kinds = given.get("layer_types") or given.get("layers_block_type")
    if kinds is None and type(given.get("num_hidden_layers")) is int:
        kinds = ["mamba"] * given["num_hidden_layers"]
    _read_kinds(kinds, "layer_types", values, faults)
    _read_common(given, rope, values, faults)
    if rope.get("partial_rotary_factor") not in (None, 1):
        faults.append("partial_rotary_factor: granitemoehybrid rotates all of a head, or nothing")
    position = given.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        faults.append(f"position_embedding_type {position!r}: must be rope, nope or null")
    values["rotary"] = position == "rope"
    if values["n_expert"] != 0:
        values |= {"top_k": given["num_experts_per_tok"], "d_expert": given["intermediate_size"]}
        if given.get("output_router_logits"):
            values["balance_coefficient"] = given.get("router_aux_loss_coef", 1e-3)
    multiplier, heads = given["attention_multiplier"], given["num_attention_heads"]
    size, width = values["head_dim"], given.get("hidden_size")
    if not are_numbers(multiplier, heads, size, width) or not heads:
        values["attention_multiplier"] = multiplier
    else:
        size = size or width // heads
        values["attention_multiplier"] = 0.0 if multiplier * size == 1 else multiplier


def _read_nemotron(given: Settings, rope: Settings, values: Settings, faults: list[str]) -> None:
    letters = given.get("hybrid_override_pattern")
    if given.get("layers_block_type") is None and isinstance(letters, str):
        values["pattern"] = letters
    else:
        _read_kinds(given.get("layers_block_type"), "layers_block_type", values, faults)
    values["n_layer"] = len(values.get("pattern", ""))
    if given["num_key_value_heads"] is None:
        values["n_kv_head"] = given["num_attention_heads"]
    _read_head_dim(given, values)
    for name, only in (("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
        if given.get(name, only) != only:
            faults.append(f"{name} {given[name]!r}: nemotron_h is made with {only}")
    if given.get("attention_bias"):
        faults.append("attention_bias: transformers' nemotron_h has none; fix: leave it out")
    if given.get("num_nextn_predict_layers"):
        faults.append(
            "num_nextn_predict_layers: layers that predict further tokens are not supported"
        )


def _read_common(given: Settings, rope: Settings, values: Settings, faults: list[str]) -> None:
    """Read what Bamba and Granite state in the same way."""
    values["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", 1e4))
    if given["num_key_value_heads"] is None:
        values["n_kv_head"] = given["num_attention_heads"]
    _read_head_dim(given, values)
    values |= read_limit(given.get("time_step_limit"), faults, "time_step_limit")
    heads, size = given["mamba_n_heads"], given["mamba_d_head"]
    expand, width = given["mamba_expand"], given.get("hidden_size")
    if not are_numbers(heads, expand, width) or not heads:
        return  # `make` reports what is no number
    if size == "auto":
        size = values["mamba_head_dim"] = expand * width // heads
    if type(size) is int and heads * size != expand * width:
        faults.append(
            f"mamba_n_heads {heads}: times mamba_d_head {size} must be mamba_expand x hidden_size"
        )
    # The families' own norm; with one group both norms are the same.
    values["norm_across_groups"] = True


def _read_head_dim(given: Settings, values: Settings) -> None:
    size, heads, width = (
        given.get(name) for name in ("head_dim", "num_attention_heads", "hidden_size")
    )
    if size is None or (are_numbers(size, heads, width) and size * heads == width):
        values["head_dim"] = 0  # ours for the size that follows from the two


def _read_kinds(kinds: Any, name: str, values: Settings, faults: list[str]) -> None:
    if not isinstance(kinds, list) or not all(is_one_of(kind, _KINDS) for kind in kinds):
        faults.append(f"{name} must be a list of {', '.join(_KINDS)}, not {kinds!r}")
    else:
        values["pattern"] = "".join(_KINDS[kind] for kind in kinds)


READ: dict[str, Callable[[Settings, Settings, Settings, list[str]], None]] = {
    "bamba": _read_bamba,
    "granitemoehybrid": _read_granite,
    "nemotron_h": _read_nemotron,
}
"""Family -> what reads its own settings and those of rotary positions into our values."""


def write(sizes: HybridConfig) -> Settings:
    """Write the settings that a family states in its own way."""
    settings: Settings = {"head_dim": sizes.d_head}
    limit = [sizes.dt_limit_low, sizes.dt_limit_high or math.inf]
    if isinstance(sizes, NemotronHConfig):
        # Programs from before transformers 5 read the pattern, and 5 reads it too.
        return settings | {
            "hybrid_override_pattern": sizes.pattern,
            "num_hidden_layers": sizes.n_layer,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "time_step_limit": limit,
        }
    settings |= {
        "mamba_expand": sizes.mamba.d_inner // sizes.d_model,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None,
    }
    if limit != [0.0, math.inf]:
        settings["time_step_limit"] = limit
    if isinstance(sizes, BambaConfig):
        where = [n for n, kind in enumerate(sizes.pattern) if kind == ATTENTION]
        return settings | {
            "attn_layer_indices": where,
            "partial_rotary_factor": 0.5,
            "attn_rotary_emb": sizes.d_rotary,
        }
    assert isinstance(sizes, GraniteHybridConfig)
    settings |= {
        "layer_types": [_WRITTEN[kind] for kind in sizes.pattern],
        "position_embedding_type": "rope" if sizes.rotary else "nope",
        "attention_multiplier": sizes.score_multiplier,
        "num_experts_per_tok": sizes.top_k,
        "intermediate_size": sizes.d_expert or sizes.d_ff,
    }
    if sizes.balance_coefficient:
        settings |= {
            "output_router_logits": True,
            "router_aux_loss_coef": sizes.balance_coefficient,
        }
    return settings


def refuse_unwritable(sizes: HybridConfig) -> None:
    """Raise RequestError for sizes that transformers does not have."""
    found = []
    across = not isinstance(sizes, NemotronHConfig)
    if sizes.n_groups > 1 and sizes.norm_across_groups != across:
        wanted = "all channels together" if across else "each group alone"
        found.append(
            f"norm_across_groups: transformers normalises {wanted} of {sizes.family}'s Mamba-2, "
            f"and this model does not, so it would not be the same model there"
        )
    if across and sizes.mamba.d_inner % sizes.d_model:
        found.append(
            f"n_mamba_head: {sizes.n_mamba_head} heads of {sizes.mamba_head_dim} channels are not "
            f"a multiple of d_model {sizes.d_model}, as transformers' {sizes.family} needs"
        )
    if isinstance(sizes, NemotronHConfig):
        if sizes.dt_limit_high:
            found.append("dt_limit_high: transformers' nemotron_h has no upper limit of delta")
        if sizes.attention_bias:
            found.append("attention_bias: transformers' nemotron_h has none")
        if sizes.tie_embeddings:
            found.append("tie_embeddings: transformers' nemotron_h always has two embeddings")
    if found:
        raise RequestError.of(found)
