"""What the entry points for Llama share: flags, and the sizes that they give a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from training.config.flags import Flag, FlagAlias
from training.config.setting import integer, number, optional
from training.errors import RequestError
from training.models import LlamaConfig, MistralConfig, MixtralConfig, NeoXConfig, Sizes

_TYPES = ("llama_v2", "llama_v3", "mistral", "mixtral", "gpt_neox")
_FLAGS = (
    Flag("model_type", str, "gpt_neox", "which model", choices=_TYPES),
    Flag("hidden_width", integer, 768, "width of the residual stream"),
    Flag("num_layers", integer, 12, "blocks"),
    Flag("num_heads", integer, 12, "heads of attention"),
    Flag(
        "num_key_value_heads", integer, None, "if fewer than num_heads, heads share keys and values"
    ),
    Flag(
        "intermediate_size",
        integer,
        None,
        "channels inside an MLP (default: 11008); gpt_neox has 4 x hidden_width",
        ("llama_intermediate_size",),
    ),
    Flag("vocab_size", integer, 50432, "ids of tokens"),
    Flag("initializer_range", number, 0.02, "standard deviation of the first weights"),
    Flag("rotary_emb_base", number, None, "base of rotary positions (default: the model type's)"),
    Flag("rotary_pct", number, None, "gpt_neox: share of the channels to rotate (default: 0.25)"),
    Flag("sliding_window", integer, None, "mistral, mixtral: positions attention sees, 0 for all"),
    Flag("resid_pdrop", number, None, "gpt_neox: dropout after attention and MLP (default: 0.1)"),
    Flag("attn_pdrop", number, None, "gpt_neox: dropout of attention (default: 0.1)"),
    Flag("embd_pdrop", number, None, "gpt_neox: dropout of embeddings, as resid_pdrop"),
    Flag("summary_first_pdrop", number, None, "dropout of a head that none of these models has"),
)
FLAGS = tuple(replace(flag, section="model") for flag in _FLAGS)
BF16 = Flag(
    *("bf16", optional, None, "compute in bfloat16, else float32; auto: on a GPU that has it"),
    section="parallel",
)
PRECISIONS = {None: "auto", True: "bf16", False: "fp32"}
"""Value of --bf16 -> our precision."""
NAMES = {
    **{"n_head": "num_heads", "n_kv_head": "num_key_value_heads", "d_ff": "intermediate_size"},
    **{"d_model": "hidden_width", "n_layer": "num_layers", "window": "sliding_window"},
    **{"rope_theta": "rotary_emb_base", "hidden_dropout": "resid_pdrop"},
    "attention_dropout": "attn_pdrop",
}
"""Our name in errors -> the flag that was meant."""

SCHEDULE_STYLES = ("cosine", "constant", "linear", "exponential", "plateau")

COMMON_FLAGS = (
    FlagAlias("train_batch_size", "batch_size", 2),
    FlagAlias("val_batch_size", "eval_batch_size", 4),
    FlagAlias("max_steps", "num_steps", 5000, ("max_training_steps",)),
    FlagAlias("epochs", "epochs", 3),
    FlagAlias("seed", "seed", 12345),
    FlagAlias("max_context_width", "seq_length", 2048),
    FlagAlias("reset_documents", "reset_documents", False),
    FlagAlias("validation_freq", "eval_interval", 0),
    FlagAlias("validation_batches", "eval_batches", 10),
    FlagAlias("lr", "learning_rate", 1e-4),
    FlagAlias("grad_clip", "grad_clip_thresh", 1.0),
    FlagAlias("weight_decay", "weight_decay", 0.2),
    FlagAlias("activation_checkpointing", "fsdp_activation_checkpointing", True),
    FlagAlias("logging_freq", "report_interval", 1),
    FlagAlias("resume_from_checkpoint", "load_ckpt_path", ""),
)


def sizes(given: Mapping[str, Any]) -> Sizes:
    """Make the sizes that the flags give.

    Raises RequestError for a flag that the model type does not have, or sizes that do not fit.
    """
    make, takes = TYPES[given["model_type"]]
    useless = [
        f"--{name}: {given['model_type']} has none"
        for name in _SOME
        if given.get(name) is not None and name not in takes
    ]
    if useless:
        raise RequestError.of(useless)
    return make(given)


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "d_model": given["hidden_width"],
        "n_layer": given["num_layers"],
        "n_head": given["num_heads"],
        "vocab_size": given["vocab_size"],
        "initializer_range": given["initializer_range"],
        "context": given["max_context_width"],
    }


def _grouped(given: Mapping[str, Any], rope_theta: float) -> dict[str, Any]:
    return {
        **_common(given),
        "n_kv_head": given["num_key_value_heads"] or given["num_heads"],
        "d_ff": _or(given["intermediate_size"], 11008),
        "rope_theta": _or(given["rotary_emb_base"], rope_theta),
    }


def _neox(given: Mapping[str, Any]) -> Sizes:
    dropout = _or(given["resid_pdrop"], 0.1)
    if _or(given["embd_pdrop"], dropout) != dropout:
        raise RequestError("--embd_pdrop: gpt_neox has one dropout for this and resid_pdrop")
    return NeoXConfig(
        **_common(given),
        d_ff=4 * given["hidden_width"],
        rotary_pct=_or(given["rotary_pct"], 0.25),
        rope_theta=_or(given["rotary_emb_base"], 1e4),
        hidden_dropout=dropout,
        attention_dropout=_or(given["attn_pdrop"], 0.1),
    )


def _mistral(given: Mapping[str, Any]) -> Sizes:
    return MistralConfig(**_grouped(given, 1e4), window=_or(given["sliding_window"], 4096))


def _mixtral(given: Mapping[str, Any]) -> Sizes:
    return MixtralConfig(
        **_grouped(given, 1e6),
        window=_or(given["sliding_window"], 0),
        n_expert=_or(given.get("num_local_experts"), 8),
        top_k=_or(given.get("num_experts_per_tok"), 2),
    )


def _or(value: float | None, default: float) -> Any:
    return default if value is None else value


_LLAMA = ("num_key_value_heads", "intermediate_size", "rotary_emb_base")
_MISTRAL = (*_LLAMA, "sliding_window")
_MIXTRAL = (*_MISTRAL, "num_local_experts", "num_experts_per_tok")
TYPES: dict[str, tuple[Callable[[Mapping[str, Any]], Sizes], tuple[str, ...]]] = {
    "llama_v2": (lambda given: LlamaConfig(**_grouped(given, 1e4)), _LLAMA),
    "llama_v3": (lambda given: LlamaConfig(**_grouped(given, 5e5)), _LLAMA),
    "mistral": (_mistral, _MISTRAL),
    "mixtral": (_mixtral, _MIXTRAL),
    "gpt_neox": (
        _neox,
        ("rotary_emb_base", "rotary_pct", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
    ),
}
"""Model type -> how its sizes are made, and which of the optional flags it takes."""
_SOME = sorted({"summary_first_pdrop"}.union(*(takes for _, takes in TYPES.values())))
"""Flags that not every model type takes; summary_first_pdrop is of a head that none has."""
