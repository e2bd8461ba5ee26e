"""Hugging Face's config.json and our sizes. No torch here.

A missing setting has the value that transformers gives it. Settings that do not change what the
weights mean (dropouts, caches, token ids) are ignored; those that do, and that our models do not
have, are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.convert import hf_hybrids
from training.convert.config import are_numbers, is_one_of, make, read_limit, read_rank
from training.errors import RequestError
from training.models import (
    ACTIVATIONS,
    HybridConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    NeoXConfig,
    RopeScaling,
    Sizes,
)
from training.ops.rope_scaling import USES

Settings = dict[str, Any]

ARCHITECTURES = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    **hf_hybrids.ARCHITECTURES,
}

_ALL = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_MAMBA = {
    **_ALL,
    "norm_eps": "layer_norm_epsilon",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "residual_in_fp32": "residual_in_fp32",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
}
_ATTENTION = {
    **_ALL,
    "n_head": "num_attention_heads",
    "d_ff": "intermediate_size",
    "context": "max_position_embeddings",
}
_MISTRAL = {
    **_ATTENTION,
    "norm_eps": "rms_norm_eps",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
}
NAMES: dict[str, dict[str, str]] = {
    "mamba": _MAMBA,
    "mamba2": {
        **_MAMBA,
        "head_dim": "head_dim",
        "n_groups": "n_groups",
        "chunk_size": "chunk_size",
    },
    "llama": {
        **_MISTRAL,
        "hidden_act": "hidden_act",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    "mistral": {**_MISTRAL, "hidden_act": "hidden_act"},
    "mixtral": {**_MISTRAL, "n_expert": "num_local_experts", "top_k": "num_experts_per_tok"},
    "gpt_neox": {
        **_ATTENTION,
        "norm_eps": "layer_norm_eps",
        "attention_bias": "attention_bias",
        "parallel_residual": "use_parallel_residual",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    **hf_hybrids.NAMES,
}
"""Family -> our names -> theirs, for settings that mean the same in both."""

_ABSENT_MAMBA = {
    "initializer_range": 0.1,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "expand": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "time_step_min": 1e-3,
    "time_step_max": 1e-1,
    "time_step_floor": 1e-4,
}
_ABSENT_ATTENTION = {"initializer_range": 0.02, "tie_word_embeddings": False}
_ABSENT_MISTRAL = {
    **_ABSENT_ATTENTION,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
}
_ABSENT: dict[str, Settings] = {
    "mamba": {**_ABSENT_MAMBA, "state_size": 16, "tie_word_embeddings": True},
    "mamba2": {
        **_ABSENT_MAMBA,
        "state_size": 128,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "chunk_size": 256,
        "tie_word_embeddings": False,
    },
    "llama": {
        **_ABSENT_MISTRAL,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {**_ABSENT_MISTRAL, "rms_norm_eps": 1e-6},
    "mixtral": {
        **_ABSENT_MISTRAL,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_neox": {
        **_ABSENT_ATTENTION,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    **hf_hybrids.ABSENT,
}
"""What transformers takes for a missing setting."""

_SWISH = "swish"
"""Another name for silu."""
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(NAMES, ("silu", _SWISH)),
    **dict.fromkeys(("llama", "mistral"), (*ACTIVATIONS, _SWISH)),
    "gpt_neox": ("gelu",),
}
"""Family -> transformers' names for the activation functions that ours may be made with."""

_ROPE_TYPES = ("default", *USES)
_CONTEXT = "original_max_position_embeddings"


def read(settings: Settings, where: Path) -> Sizes:
    """Read the sizes. Raises RequestError naming each setting that our models do not have."""
    family = settings["model_type"]
    if not is_one_of(family, NAMES):
        raise RequestError(
            f"{where}: model_type {family!r} is not supported (known: {', '.join(NAMES)})"
        )
    given = {**_ABSENT[family], **settings}
    values = {ours: given[theirs] for ours, theirs in NAMES[family].items() if theirs in given}
    faults = _not_ours(family, settings)
    if family == "mamba":
        _read_mamba(given, values, faults)
    elif family == "mamba2":
        _read_mamba2(given, values, faults)
    elif family == "gpt_neox":
        _read_neox(given, values, faults)
    elif family in hf_hybrids.READ:
        rope = _rope(given, faults)
        if _rope_type(rope) != "default":
            faults.append(f"rope type {_rope_type(rope)!r}: {family} is made with default")
        hf_hybrids.READ[family](given, rope, values, faults)
    else:
        _read_llama(family, given, values, faults)
    return make(family, values, where, NAMES[family], faults)


def write(sizes: Sizes) -> Settings:
    """Write a model's settings. Raises RequestError for sizes that transformers does not have."""
    family = sizes.family
    _refuse_unwritable(sizes)
    settings: Settings = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    settings |= {theirs: getattr(sizes, ours) for ours, theirs in NAMES[family].items()}
    if family != "nemotron_h":
        settings.setdefault("hidden_act", _ACTIVATIONS[family][0])
    # Null, or transformers would take its own numbers, which may be ordinary tokens here.
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    # Rotary settings get their old names, from before transformers 5, which reads those too.
    if isinstance(sizes, HybridConfig):
        settings |= hf_hybrids.write(sizes)
    elif isinstance(sizes, MambaConfig):
        settings |= {"time_step_rank": sizes.d_delta, "intermediate_size": sizes.d_inner}
    elif isinstance(sizes, Mamba2Config):
        settings["num_heads"] = sizes.n_head
        if sizes.is_limited:
            settings["time_step_limit"] = list(sizes.dt_limit)
    elif isinstance(sizes, NeoXConfig):
        settings |= {"rotary_pct": sizes.rotary_pct, "rotary_emb_base": sizes.rope_theta}
    elif isinstance(sizes, LlamaConfig):
        settings |= {
            "head_dim": sizes.d_head,
            "rope_theta": sizes.rope_theta,
            **_write_rope(sizes.rope_scaling),
        }
        if isinstance(sizes, MistralConfig):
            settings["sliding_window"] = sizes.window or None
        coefficient = getattr(sizes, "balance_coefficient", 0.0)
        if coefficient:
            settings |= {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    return settings


def _not_ours(family: str, settings: Settings) -> list[str]:
    """List settings of any family that change what the weights mean, and that ours lack."""
    found = []
    activation = settings.get("hidden_act", _ACTIVATIONS[family][0])
    if activation not in _ACTIVATIONS[family]:
        known = " or ".join(one for one in _ACTIVATIONS[family] if one != _SWISH)
        found.append(f"hidden_act {activation!r}: {family} is made with {known}")
    if settings.get("quantization_config") is not None:
        found.append(
            "quantization_config: quantised weights are not read; fix: give the original ones"
        )
    return found


def _read_mamba(given: Settings, values: Settings, faults: list[str]) -> None:
    rank, width = given.get("time_step_rank"), given.get("hidden_size")
    values |= read_rank(rank, width, faults, "time_step_rank")


def _read_mamba2(given: Settings, values: Settings, faults: list[str]) -> None:
    values |= read_limit(given.get("time_step_limit"), faults, "time_step_limit")
    heads, size = given["num_heads"], given["head_dim"]
    expand, width = given["expand"], given.get("hidden_size", 0)
    numbers = all(type(number) is int for number in (heads, size, expand, width))
    if numbers and heads * size != expand * width:  # `make` reports what is no number
        faults.append(f"num_heads {heads}: times head_dim {size} must be expand x hidden_size")
    # With one group both norms are the same; then it is the default, as in training.
    within = given.get("rmsnorm_within_groups", False)  # a setting of the Neuron system
    if type(within) is not bool:
        faults.append(f"rmsnorm_within_groups must be true or false, not {within!r}")
    values["norm_across_groups"] = given["n_groups"] != 1 and not within


def _read_neox(given: Settings, values: Settings, faults: list[str]) -> None:
    rope = _rope(given, faults)
    kind = _rope_type(rope)
    if kind != "default":
        faults.append(f"rope type {kind!r}: gpt_neox is made with default")
    values["rotary_pct"] = rope.get("partial_rotary_factor", given.get("rotary_pct", 0.25))
    values["rope_theta"] = rope.get("rope_theta", given.get("rotary_emb_base", 1e4))


def _read_llama(family: str, given: Settings, values: Settings, faults: list[str]) -> None:
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    if values.get("hidden_act") == _SWISH:
        values["hidden_act"] = "silu"
    if values["n_kv_head"] is None and heads is not None:
        values["n_kv_head"] = heads
    size = values["head_dim"]
    if size is None or (are_numbers(size, heads, width) and size * heads == width):
        values["head_dim"] = 0  # ours for the size that follows from the two
    rope = _rope(given, faults)
    absent = 1e6 if family == "mixtral" else 1e4
    values["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", absent))
    values["rope_scaling"] = _read_rope(rope, given, values, faults)
    factor = rope.get("partial_rotary_factor", given.get("partial_rotary_factor"))
    if factor not in (None, 1):
        faults.append(f"partial_rotary_factor {factor}: {family} rotates all of a head")
    if given.get("layer_types") is not None:
        faults.append("layer_types: all layers of ours are of one type")
    if family != "llama":
        values["window"] = given.get("sliding_window", 4096 if family == "mistral" else None) or 0
    if family == "mixtral" and given.get("output_router_logits"):
        values["balance_coefficient"] = given.get("router_aux_loss_coef", 1e-3)


def _rope(given: Settings, faults: list[str]) -> Settings:
    """Find the rotary settings, under their name in transformers 4 or 5."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        return rope
    faults.append("rope_parameters: must be one table for all layers")
    return {}


def _rope_type(rope: Settings) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _read_rope(
    rope: Settings, given: Settings, values: Settings, faults: list[str]
) -> RopeScaling | None:
    kind, positions = _rope_type(rope), given["max_position_embeddings"]
    if kind not in _ROPE_TYPES:
        faults.append(f"rope type {kind!r}: not supported (known: {', '.join(_ROPE_TYPES)})")
    if not is_one_of(kind, USES) or type(positions) is not int:  # `make` reports what is no number
        return None
    found = {name: rope[name] for name in USES[kind] if rope.get(name) is not None}
    if kind == "dynamic":
        found["original_context"] = positions
    elif kind != "linear":
        # As in transformers, one beside the table takes precedence.
        found["original_context"] = given.get(_CONTEXT) or rope.get(_CONTEXT) or positions
    if kind in ("yarn", "longrope") and type(found["original_context"]) is int:
        ratio = positions / (found["original_context"] or 1)
        found.setdefault("factor", ratio if kind == "yarn" else max(1.0, ratio))
    try:
        scaling = RopeScaling.of({"kind": kind, **found})
    except RequestError as error:
        faults += [one.replace("original_context", _CONTEXT) for one in error.faults]
        return None
    if kind == "dynamic":  # theirs is the context that the model was trained with
        values["context"] = int(positions * scaling.factor)
    return scaling


def _write_rope(scaling: RopeScaling | None) -> Settings:
    if scaling is None:
        return {"rope_scaling": None}
    used = {name: value for name, value in scaling.used().items() if value is not None}
    used = {name: list(v) if isinstance(v, tuple) else v for name, v in used.items()}
    context = used.pop("original_context", None)
    for name in ("mscale", "mscale_all_dim"):  # 0 means that they are missing
        if not used.get(name):
            used.pop(name, None)
    written: Settings = {"rope_scaling": {"rope_type": scaling.kind, **used}}
    if scaling.kind == "dynamic":
        written["max_position_embeddings"] = context
    elif context is not None:
        written["rope_scaling"][_CONTEXT] = context
    return written


def _refuse_unwritable(sizes: Sizes) -> None:
    if isinstance(sizes, Mamba2Config) and sizes.n_groups > 1 and not sizes.norm_across_groups:
        raise RequestError(
            f"n_groups: transformers normalises all channels of Mamba-2 together, and this model "
            f"each of its {sizes.n_groups} groups alone, so it would not be the same model there; "
            f"only one group can be converted (neuron-fused is this layout, and says how it is)"
        )
    if isinstance(sizes, HybridConfig):
        hf_hybrids.refuse_unwritable(sizes)
    if isinstance(sizes, LlamaConfig) and sizes.family == "llama" and sizes.d_model % sizes.n_head:
        raise RequestError(
            f"n_head: transformers' llama needs heads that divide the width, whatever their "
            f"size, but {sizes.n_head} do not divide d_model {sizes.d_model}; without biases "
            f"mistral with a window of 0 is the same model, and may have them"
        )
    if sizes.family in ("mistral", "mixtral"):
        for name in ("attention_bias", "mlp_bias"):
            if getattr(sizes, name):
                raise RequestError(f"{name}: transformers' {sizes.family} has none")
