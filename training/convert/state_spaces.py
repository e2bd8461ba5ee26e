"""The settings of mamba-ssm (state-spaces) and our sizes: Mamba, Mamba-2, and fms-fsdp's Bamba.

Its norms always have an epsilon of 1e-5; its vocab_size counts the tokens, and the embedding is
padded to a multiple. Mamba-2's gated norm works on each group by itself. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.convert.config import is_one_of, make, read_limit, read_rank, read_table
from training.errors import RequestError
from training.models import BambaConfig, Mamba2Config, MambaConfig, Sizes
from training.models.hybrid_sizes import ATTENTION, MAMBA

Settings = dict[str, Any]

_EPSILON = 1e-5
_MAMBA = {
    "d_state": "d_state",
    "d_conv": "d_conv",
    "expand": "expand",
    "bias": "bias",
    "conv_bias": "conv_bias",
    "dt_min": "dt_min",
    "dt_max": "dt_max",
    "dt_init_floor": "dt_init_floor",
}
_NAMES = {
    "mamba": _MAMBA,
    "mamba2": {
        **_MAMBA,
        "head_dim": "headdim",
        "n_groups": "ngroups",
        "chunk_size": "chunk_size",
    },
}
"""Family -> our names -> those of ssm_cfg; both have the same defaults."""
_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
_ONLY_OF_MODEL: dict[str, tuple[Any, ...]] = {
    "d_intermediate": (0,),
    "attn_layer_idx": ([], None),
    "rms_norm": (True,),
}
"""Settings of the model -> the values that ours may have."""
_ONLY_OF_LAYERS: dict[str, tuple[Any, ...]] = {
    "d_ssm": (None,),
    "D_has_hdim": (False,),
    "rmsnorm": (True,),
    "norm_before_gate": (False,),
}
"""The same for settings in ssm_cfg."""


def read(settings: Settings, where: Path) -> Sizes:
    """Read the sizes. Raises RequestError naming each setting that our models do not have."""
    layers = read_table(settings, "ssm_cfg", where)
    if settings.get("attn_layer_idx") and settings.get("d_intermediate"):
        return _read_hybrid(settings, layers, where)
    layer = layers.get("layer", "Mamba1")
    if not is_one_of(layer, _LAYERS):
        raise RequestError(
            f"{where}: ssm_cfg.layer {layer!r} is not supported (known: {', '.join(_LAYERS)})"
        )
    family = _LAYERS[layer]
    faults = _others("", settings, _ONLY_OF_MODEL) + _others("ssm_cfg.", layers, _ONLY_OF_LAYERS)
    values: Settings = {n: settings[n] for n in ("d_model", "n_layer") if n in settings}
    values |= {
        "vocab_size": _padded(settings),
        "tie_embeddings": settings.get("tie_embeddings", True),
        "residual_in_fp32": settings.get("residual_in_fp32", True),
        "norm_eps": _EPSILON,
    }
    if family == "mamba":
        width = settings.get("d_model")
        values |= read_rank(layers.get("dt_rank"), width, faults, "ssm_cfg.dt_rank")
    else:
        values |= read_limit(layers.get("dt_limit"), faults, "ssm_cfg.dt_limit")
    names = _NAMES[family]
    values |= {ours: layers[theirs] for ours, theirs in names.items() if theirs in layers}
    called = {ours: f"ssm_cfg.{theirs}" for ours, theirs in names.items()}
    return make(family, values, where, called, faults)


def write(sizes: Sizes) -> Settings:
    """Write the settings of a model. Raises RequestError for sizes that mamba-ssm does not have."""
    if isinstance(sizes, BambaConfig):
        return _write_hybrid(sizes)
    if not isinstance(sizes, MambaConfig | Mamba2Config):
        raise RequestError(
            f"state-spaces: has Mamba, Mamba-2 and Bamba models only, not {sizes.family}"
        )
    if sizes.norm_eps != _EPSILON:
        raise RequestError(f"norm_eps {sizes.norm_eps}: mamba-ssm's norms always have {_EPSILON}")
    layers = {theirs: getattr(sizes, ours) for ours, theirs in _NAMES[sizes.family].items()}
    if isinstance(sizes, MambaConfig):
        layers |= {"dt_rank": sizes.dt_rank} if sizes.dt_rank else {}
    else:
        layers = {"layer": "Mamba2", **layers}
        layers |= {"dt_limit": list(sizes.dt_limit)} if sizes.is_limited else {}
        if sizes.n_groups > 1 and sizes.norm_across_groups:
            raise RequestError(
                f"n_groups: mamba-ssm normalises each group of Mamba-2's channels alone, and this "
                f"model its {sizes.n_groups} groups together, so it would not be the same model "
                f"there; only one group can be converted"
            )
    return {
        "d_model": sizes.d_model,
        "n_layer": sizes.n_layer,
        "vocab_size": sizes.vocab_size,
        "ssm_cfg": layers,
        "rms_norm": True,
        "residual_in_fp32": sizes.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # vocab_size already is that of the embedding
        "tie_embeddings": sizes.tie_embeddings,
    }


_OF_HYBRID = {
    "d_state": "d_state",
    "d_conv": "d_conv",
    "bias": "bias",
    "conv_bias": "conv_bias",
    "mamba_head_dim": "headdim",
    "n_groups": "ngroups",
    "chunk_size": "chunk_size",
}
_ABSENT_HYBRID = {
    **{"d_state": 128, "d_conv": 4, "expand": 2, "bias": False, "conv_bias": True},
    **{"headdim": 64, "ngroups": 1, "chunk_size": 256},
}
_OF_HEADS = {
    "n_kv_head": "num_heads_kv",
    "rope_theta": "rotary_emb_base",
    "attention_bias": "qkv_proj_bias",
}
_ONLY_OF_HYBRID: dict[str, tuple[Any, ...]] = {"rms_norm": (True,)}
_ONLY_OF_HEADS: dict[str, tuple[Any, ...]] = {
    "causal": (True,),
    "d_conv": (0, None),
    "mlp_dim": (0, None),
    "rotary_emb_interleaved": (False,),
    "softmax_scale": (None,),
}
_MULTIPLE_OF_MLP = 128
"""mamba-ssm rounds the width of an MLP up to a multiple of this."""


def _read_hybrid(settings: Settings, layers: Settings, where: Path) -> Sizes:
    """Read Mamba-2 with MLPs and attention in some layers, which is Bamba, in fms-fsdp's layout."""
    heads, layers = read_table(settings, "attn_cfg", where), {**_ABSENT_HYBRID, **layers}
    faults = _others("", settings, _ONLY_OF_HYBRID) + _others("ssm_cfg.", layers, _ONLY_OF_LAYERS)
    faults += _others("attn_cfg.", {"causal": False, **heads}, _ONLY_OF_HEADS)
    if layers.get("layer") != "Mamba2":
        faults.append(f"ssm_cfg.layer {layers.get('layer')!r}: with attention ours has Mamba2 only")
    numbers = {
        **{name: settings.get(name) for name in ("d_model", "n_layer", "d_intermediate")},
        **{f"ssm_cfg.{name}": layers[name] for name in ("expand", "headdim")},
        "attn_cfg.num_heads": heads.get("num_heads"),
    }
    if heads.get("head_dim"):  # else it follows from the width
        numbers["attn_cfg.head_dim"] = heads["head_dim"]
    wrong = {name: value for name, value in numbers.items() if type(value) is not int or value < 1}
    faults += [
        f"{name} must be a whole number of at least 1, not {v!r}" for name, v in wrong.items()
    ]
    where_attention = settings["attn_layer_idx"]
    if not isinstance(where_attention, list):
        faults.append(f"attn_layer_idx must be a list of whole numbers, not {where_attention!r}")
    if faults:
        raise RequestError.of([f"{where}: {fault}" for fault in faults])
    width, n_head, n_layer = settings["d_model"], heads["num_heads"], settings["n_layer"]
    size = heads.get("head_dim") or width // n_head
    if heads.get("rotary_emb_dim", 0) != size // 2:
        faults.append(f"attn_cfg.rotary_emb_dim: ours is always half of head_dim, {size // 2}")
    bias = heads.get("qkv_proj_bias", True)
    if bias != heads.get("out_proj_bias", True):
        faults.append("attn_cfg.qkv_proj_bias: ours has it and out_proj_bias, or neither")
    inner = layers["expand"] * width
    if inner % layers["headdim"]:
        faults.append(f"ssm_cfg.headdim {layers['headdim']}: does not divide {inner} channels")
    values: Settings = {
        "d_model": width,
        "n_layer": n_layer,
        "pattern": "".join(ATTENTION if n in where_attention else MAMBA for n in range(n_layer)),
        "vocab_size": _padded(settings),
        "tie_embeddings": settings.get("tie_embeddings", True),
        "residual_in_fp32": settings.get("residual_in_fp32", True),
        "norm_eps": _EPSILON,
        "norm_across_groups": layers["ngroups"] == 1,  # with one group both are the same
        "n_head": n_head,
        "n_kv_head": heads.get("num_heads_kv") or n_head,
        "head_dim": 0 if size * n_head == width else size,
        "rope_theta": heads.get("rotary_emb_base", 1e4),
        "attention_bias": bias,
        "d_ff": -(-settings["d_intermediate"] // _MULTIPLE_OF_MLP) * _MULTIPLE_OF_MLP,
        "n_mamba_head": inner // layers["headdim"],
        **{ours: layers[theirs] for ours, theirs in _OF_HYBRID.items()},
        **read_limit(layers.get("dt_limit"), faults, "ssm_cfg.dt_limit"),
    }
    called = {ours: f"ssm_cfg.{theirs}" for ours, theirs in _OF_HYBRID.items()}
    called |= {ours: f"attn_cfg.{theirs}" for ours, theirs in _OF_HEADS.items()}
    return make("bamba", values, where, called, faults)


def _write_hybrid(sizes: BambaConfig) -> Settings:
    """Write the settings of a Bamba model in fms-fsdp's layout."""
    faults = []
    if sizes.norm_eps != _EPSILON:
        faults.append(f"norm_eps {sizes.norm_eps}: mamba-ssm's norms always have {_EPSILON}")
    if sizes.n_groups > 1 and sizes.norm_across_groups:
        faults.append(
            f"n_groups: mamba-ssm normalises each of the {sizes.n_groups} groups alone, and this "
            f"model all together; only one group can be converted"
        )
    if sizes.mlp_bias:
        faults.append("mlp_bias: mamba-ssm's MLPs have none")
    if sizes.d_ff % _MULTIPLE_OF_MLP:
        faults.append(f"d_ff: mamba-ssm has multiples of {_MULTIPLE_OF_MLP} only, not {sizes.d_ff}")
    if sizes.mamba.d_inner % sizes.d_model:
        faults.append(f"n_mamba_head: mamba-ssm's are a multiple of d_model {sizes.d_model} wide")
    if ATTENTION not in sizes.pattern:
        faults.append("pattern: without attention mamba-ssm's layout of Bamba is not written")
    if faults:
        raise RequestError.of(faults)
    layers = {"layer": "Mamba2", "expand": sizes.mamba.d_inner // sizes.d_model}
    layers |= {theirs: getattr(sizes, ours) for ours, theirs in _OF_HYBRID.items()}
    if sizes.mamba.is_limited:
        layers["dt_limit"] = list(sizes.mamba.dt_limit)
    return {
        "d_model": sizes.d_model,
        "d_intermediate": sizes.d_ff,
        "n_layer": sizes.n_layer,
        "vocab_size": sizes.vocab_size,
        "ssm_cfg": layers,
        "attn_layer_idx": [n for n, kind in enumerate(sizes.pattern) if kind == ATTENTION],
        "attn_cfg": {
            "causal": True,
            "d_conv": 0,
            "head_dim": sizes.d_head,
            "num_heads": sizes.n_head,
            "num_heads_kv": sizes.n_kv_head,
            "out_proj_bias": sizes.attention_bias,
            "qkv_proj_bias": sizes.attention_bias,
            "rotary_emb_dim": sizes.d_rotary,
            "rotary_emb_base": sizes.rope_theta,
        },
        "rms_norm": True,
        "residual_in_fp32": sizes.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # vocab_size already is that of the embedding
        "tie_embeddings": sizes.tie_embeddings,
    }


def _others(prefix: str, settings: Settings, only: dict[str, tuple[Any, ...]]) -> list[str]:
    """List settings that have another value than ours may have."""
    return [
        f"{prefix}{name} {settings[name]!r}: ours has {accepted[0]!r} only"
        for name, accepted in only.items()
        if name in settings and settings[name] not in accepted
    ]


def _padded(settings: Settings) -> Any:
    """Return the rows of the embedding; what is not a number is left for `make` to report."""
    size, multiple = settings.get("vocab_size", 50277), settings.get("pad_vocab_size_multiple", 8)
    if type(size) is not int or type(multiple) is not int or multiple < 1:
        return size
    return -(-size // multiple) * multiple
