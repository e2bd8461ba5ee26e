"""Pre-train Llama, Mistral, Mixtral or GPT-NeoX with FSDP: `... -m training.llama_fsdp --flag=...`.

The model is given by its sizes. Runs under torchrun on any number of ranks, or alone under plain
python. Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 85 stopped by SIGTERM after a
checkpoint (start it again), 86 ended by its watch because it made no progress.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.config.config import Config
from training.config.flags import (
    Flag,
    FlagAlias,
    assemble,
    names_of,
    parse,
    settings_of,
    with_ours,
)
from training.config.sections import STREAM
from training.config.setting import path
from training.data.how_to_read import is_tokenized
from training.data.splits import NoSplit, find, is_local
from training.entrypoint import enter, leave, renamed
from training.errors import RequestError
from training.systems import llama
from training.systems.llama import COMMON_FLAGS, SCHEDULE_STYLES

SHARDING = {"full": "fsdp", "hybrid": "hsdp", "none": "ddp"}
MOVED = {"c4": "allenai/c4"}
"""Sets that have another name on the hub now."""


KNOWN = (
    *COMMON_FLAGS,
    FlagAlias("dataset_config_name", "dataset_config", ""),
    FlagAlias("tokenizer", "tokenizer", "EleutherAI/gpt-neox-20b"),
    FlagAlias("low_cpu_fsdp", "low_cpu_fsdp", True),
    FlagAlias("checkpoint_freq", "checkpoint_interval", 1000),
    FlagAlias("checkpoint_dir", "save_ckpt_path", ""),
)
NAMES = names_of(
    KNOWN,
    schedule="lr_decay_style",
    dataset_path="dataset",
    precision="bf16",
    **llama.NAMES,
)
"""Our name in errors -> the flag that was meant."""

COMMON = (
    *("model_type", "dataset", "tokenizer", "checkpoint_dir", "max_context_width"),
    *("train_batch_size", "lr", "max_steps", "sharding_strategy", "activation_checkpointing"),
)
"""The most used flags, which help shows first."""

OWN = (
    llama.BF16,
    Flag(
        *("lr_decay_style", str, "cosine", "how the learning rate changes"),
        choices=SCHEDULE_STYLES,
        section="schedule",
    ),
    Flag(
        *("sharding_strategy", str, "full", "over all ranks, within groups of them, or none"),
        choices=tuple(SHARDING),
        section="parallel",
    ),
    Flag(
        "dataset",
        path,
        "c4",
        "a set on the hub, streamed; a folder or source of docs/training/data.md",
        ("dataset_path",),
        section="data",
    ),
)
TAKEN = {"precision", "schedule", "sharding_strategy", "dataset_path"}
"""Our settings that the system's own flags determine."""


FLAGS = with_ours((*llama.FLAGS, *OWN), KNOWN, TAKEN)


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    program = "python -m training.llama_fsdp"
    given = parse(FLAGS, arguments, program=program, about=str(__doc__), common=COMMON)
    settings = settings_of(given, KNOWN)
    settings |= {
        "precision": llama.PRECISIONS[given["bf16"]],
        "schedule": given["lr_decay_style"],
        "sharding_strategy": SHARDING[given["sharding_strategy"]],
        "dataset_path": _source(given["dataset"]),
    }
    try:
        if given["validation_freq"] and not settings["eval_dataset_path"] and _has_split(settings):
            settings["eval_dataset_path"] = settings["dataset_path"]  # its eval_split
        _forget_defaults(settings)
        return assemble(settings, {"name": given["model_type"], "sizes": llama.sizes(given)})
    except RequestError as error:
        raise RequestError(renamed(str(error), NAMES)) from error


def _source(dataset: str) -> str:
    """Return the source to stream for a name; a kind, a path or a tokenized set stays as it is."""
    is_path = dataset.startswith(("/", "./", "../", "~"))
    if ":" in dataset or is_path or is_tokenized(Path(dataset)):
        return dataset
    return f"{STREAM}{MOVED.get(dataset, dataset)}"


def _has_split(settings: Mapping[str, Any]) -> bool:
    """Return whether the training data has another part to evaluate on. Raises RequestError."""
    source = settings["dataset_path"]
    name = source.removeprefix(STREAM)
    if name == source:
        return (Path(source) / "dataset_dict.json").is_file()
    if not is_local(name):
        return True  # sets on the hub have splits, or the hub says that they have none
    try:
        return bool(find(name, settings["dataset_config"]).files(settings["eval_split"]))
    except NoSplit as error:
        raise RequestError(
            f"eval_interval: {error}; fix: name one with eval_split, or other data with "
            "eval_dataset_path"
        ) from error
    except RequestError as error:
        raise RequestError(f"dataset_path: {error}") from error


def _forget_defaults(settings: dict[str, Any]) -> None:
    """Drop settings at the system's defaults that nothing uses in this run."""
    sources = settings["dataset_path"], settings["eval_dataset_path"]
    defaults = {one.setting: one.default for one in KNOWN}
    used = {
        "tokenizer": any(source.startswith(STREAM) for source in sources),
        "eval_batch_size": bool(sources[1]),
    }
    for name, is_used in used.items():
        if not is_used and settings[name] == defaults[name]:
            del settings[name]


if __name__ == "__main__":
    leave(enter(configure, sys.argv[1:], NAMES))
