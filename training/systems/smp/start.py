"""Where training begins: random weights, those of a pretrained model, or a file of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.models import Sizes
from training.systems.smp import model

ONLY_FINETUNING = (
    "pretrained_model_name",
    "finetune_checkpoint_load_dir",
    "pretrained_checkpoint_file",
)


@dataclass(frozen=True)
class Start:
    """The model, its name, and its first values (settings of ModelConfig)."""

    name: str
    sizes: Sizes
    init_weights: str = ""
    init_hub: str = ""


def faults(given: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the flags of finetuning, and files that are not there."""
    own, other = given["pretrained_model_name"], given["hf_pretrained_model_name_or_dir"]
    folder, file = given["finetune_checkpoint_load_dir"], given["pretrained_checkpoint_file"]
    found = []
    if not given["finetune"]:
        found += [f"--{n}: counts only with --finetune 1" for n in ONLY_FINETUNING if given[n]]
    elif other:
        found += [
            f"--{name}: hf_pretrained_model_name_or_dir says it already; leave one out"
            for name in ONLY_FINETUNING
            if given[name]
        ]
    elif not own and not file:
        found.append(
            "--finetune: give pretrained_model_name with finetune_checkpoint_load_dir, or "
            "pretrained_checkpoint_file"
        )
    elif own and not folder:
        found.append("--finetune_checkpoint_load_dir: must be given with pretrained_model_name")
    if file and not Path(folder, file).is_file():
        found.append(f"--pretrained_checkpoint_file: {Path(folder, file)} is not there")
    if Path(own).is_dir() and folder and not file and not Path(folder).is_dir():
        found.append(f"--finetune_checkpoint_load_dir: {folder} is not there")
    return found


def start(given: Mapping[str, Any]) -> Start:
    """Make what the flags mean, which `faults` has found nothing wrong with. Raises RequestError.

    A pretrained model's config may be asked for in the hub here; its weights are not yet.
    """
    name = given["pretrained_model_name"] or given["hf_pretrained_model_name_or_dir"]
    folder, file = given["finetune_checkpoint_load_dir"], given["pretrained_checkpoint_file"]
    weights = str(Path(folder, file)) if file else folder
    if not name:
        size = f" {given['model_size']}" if given["model_size"] else ""
        called = f"{given['model_type'] or 'gpt_neox'}{size}"
        return Start(called, model.sizes(given), weights)
    sizes = model.pretrained(name, folder, given)
    if Path(name).is_dir():
        return Start(name, sizes, weights or name)
    return Start(name, sizes, weights, "" if file else name)
