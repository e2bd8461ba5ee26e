"""Which model the flags mean, and what training starts from.

The model is given by its size, its sizes, or a pretrained one's config. Training starts from random
weights, those of a pretrained model, or a file of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint import hub
from training.errors import RequestError
from training.models import Sizes
from training.systems import llama

_LLAMA = {"vocab_size": 32000}
MODEL_SIZES: dict[str, dict[str, dict[str, int]]] = {
    "llama_v2": {
        "7b": {**_LLAMA, "hidden_width": 4096, "num_layers": 32, "num_heads": 32},
        "13b": {
            **_LLAMA,
            "hidden_width": 5120,
            "num_layers": 40,
            "num_heads": 40,
            "intermediate_size": 13824,
        },
        "70b": {
            **_LLAMA,
            "hidden_width": 8192,
            "num_layers": 80,
            "num_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
        },
    },
    "gpt_neox": {
        "7b": {"hidden_width": 4096, "num_layers": 32, "num_heads": 32},
        "13b": {"hidden_width": 5120, "num_layers": 40, "num_heads": 40},
        "20b": {"hidden_width": 6144, "num_layers": 44, "num_heads": 64},
        "65b": {"hidden_width": 8192, "num_layers": 80, "num_heads": 64},
    },
}
"""Model type -> name of a size -> the flags that it stands for."""
SHARD_DEGREES = {"7b": 8, "13b": 64, "20b": 64, "65b": 128, "70b": 64}
"""Default number of ranks that share a copy of a model of this size."""

DEFAULT_SIZES = {
    "hidden_width": 768,
    "num_layers": 12,
    "num_heads": 12,
    "vocab_size": 50432,
    "initializer_range": 0.02,
}
_WIDE = ("mistral", "mixtral")
"""Model types whose MLPs are 14336 wide by default."""

_OURS = {
    **{flag: ours for ours, flag in llama.NAMES.items()},
    **{"vocab_size": "vocab_size", "rotary_pct": "rotary_pct"},
    **{"num_local_experts": "n_expert", "num_experts_per_tok": "top_k"},
    "embd_pdrop": "hidden_dropout",
}
"""Flags of sizes -> our names. (initializer_range only says how random values are drawn.)"""
_FAMILIES = {"llama_v2": "llama", "llama_v3": "llama"}

FINETUNING_FLAGS = (
    "pretrained_model_name",
    "finetune_checkpoint_load_dir",
    "pretrained_checkpoint_file",
)


def size_faults(given: Mapping[str, Any]) -> list[str]:
    """List the faults of model_size, for a known model_type."""
    kind, size = given["model_type"] or "gpt_neox", given["model_size"]
    known = MODEL_SIZES.get(kind, {})
    if not size or size in known:
        return []
    have = f"has {', '.join(known)}" if known else "has none, so give its sizes by flags"
    return [f"--model_size: {kind} {have}, not {size!r}"]


def sizes_of(given: Mapping[str, Any]) -> Sizes:
    """Make the sizes that the flags give. Raises RequestError if they do not fit."""
    kind = given["model_type"] or "gpt_neox"
    named = MODEL_SIZES.get(kind, {}).get(given["model_size"], {})
    wide = {"intermediate_size": 14336} if kind in _WIDE else {}
    asked = {name: value for name, value in given.items() if value is not None}
    return llama.sizes({**given, **DEFAULT_SIZES, **wide, **named, **asked, "model_type": kind})


def pretrained_sizes(name: str, folder: str, given: Mapping[str, Any]) -> Sizes:
    """Read the sizes of a pretrained model: a local folder, or a name on the hub.

    Raises RequestError for a model that does not exist or is of none of our families, and for flags
    that ask for sizes that it does not have.
    """
    from training.convert import hf
    from training.convert.config import read_json

    file = Path(name) / hub.CONFIG if Path(name).is_dir() else hub.config_file(name, folder)
    settings = read_json(file)
    if "model_type" not in settings:
        raise RequestError(f"{file}: has no model_type, which a model's config on the hub has")
    found = hf.read(settings, file)
    wrong = _differing(found, given)
    if wrong:
        raise RequestError.of(wrong)
    return found


def _differing(found: Sizes, given: Mapping[str, Any]) -> list[str]:
    """List the flags that ask for other sizes than a pretrained model's."""
    wrong = []
    kind = given["model_type"]
    if kind and _FAMILIES.get(kind, kind) != found.family:
        wrong.append(f"--model_type: the pretrained model is of family {found.family}, not {kind}")
    if given["model_size"]:
        wrong.append("--model_size: the pretrained model has its own sizes; fix: leave it out")
    for flag, ours in _OURS.items():
        value, has = given[flag], getattr(found, ours, None)
        if value is not None and value != has:
            there = f"has {has}" if has is not None else f"is {found.family}, which has none"
            wrong.append(f"--{flag}: the pretrained model {there}, not {value}; fix: leave it out")
    if given["summary_first_pdrop"] is not None:
        wrong.append("--summary_first_pdrop: the pretrained model has none; fix: leave it out")
    return wrong


@dataclass(frozen=True)
class Start:
    """The model, its name, and its initial values (settings of ModelConfig)."""

    name: str
    sizes: Sizes
    init_weights: str = ""
    init_hub: str = ""


def start_faults(given: Mapping[str, Any]) -> list[str]:
    """List the faults of the flags for finetuning, and the files that are missing."""
    own, other = given["pretrained_model_name"], given["hf_pretrained_model_name_or_dir"]
    folder, file = given["finetune_checkpoint_load_dir"], given["pretrained_checkpoint_file"]
    found = []
    if not given["finetune"]:
        found += [
            f"--{n}: has no effect without --finetune 1" for n in FINETUNING_FLAGS if given[n]
        ]
    elif other:
        found += [
            f"--{name}: hf_pretrained_model_name_or_dir says it already; fix: leave one out"
            for name in FINETUNING_FLAGS
            if given[name]
        ]
    elif not own and not file:
        found.append(
            "--finetune: there is nothing to start from; fix: give pretrained_model_name with "
            "finetune_checkpoint_load_dir, or pretrained_checkpoint_file"
        )
    elif own and not folder:
        found.append("--finetune_checkpoint_load_dir: must be given with pretrained_model_name")
    if file and not Path(folder, file).is_file():
        found.append(f"--pretrained_checkpoint_file: {Path(folder, file)} does not exist")
    if Path(own).is_dir() and folder and not file and not Path(folder).is_dir():
        found.append(f"--finetune_checkpoint_load_dir: {folder} does not exist")
    return found


def start_of(given: Mapping[str, Any]) -> Start:
    """Make what the flags mean, after `start_faults` has found no faults. Raises RequestError.

    This may fetch a pretrained model's config from the hub, but not its weights.
    """
    name = given["pretrained_model_name"] or given["hf_pretrained_model_name_or_dir"]
    folder, file = given["finetune_checkpoint_load_dir"], given["pretrained_checkpoint_file"]
    weights = str(Path(folder, file)) if file else folder
    if not name:
        size = f" {given['model_size']}" if given["model_size"] else ""
        called = f"{given['model_type'] or 'gpt_neox'}{size}"
        return Start(called, sizes_of(given), weights)
    sizes = pretrained_sizes(name, folder, given)
    if Path(name).is_dir():
        return Start(name, sizes, weights or name)
    return Start(name, sizes, weights, "" if file else name)
