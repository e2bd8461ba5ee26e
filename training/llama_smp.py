"""Pre-train or finetune Llama as SMP v2's program does: `... -m training.llama_smp --flag=...`.

It takes the flags of the program for SageMaker's model parallel library, version 2. If that
library, torch.sagemaker, is installed, it does the work; otherwise torch's own FSDP and tensor
parallelism do the same, and the log says so. Runs under torchrun on any number of ranks, or alone
under plain python. Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 85 stopped by
SIGTERM after a checkpoint (start it again), 86 ended by its watch because it made no progress.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from training.config.config import Config
from training.config.flags import assemble, parse, settings_of
from training.data.remote import is_url
from training.entrypoint import enter, leave, renamed
from training.errors import RequestError
from training.systems.llama import PRECISIONS
from training.systems.smp import model
from training.systems.smp.flags import COMMON, FLAGS, KNOWN, names_for, refused_flags
from training.systems.smp.settings import data_settings, has_smp_library, sharding_settings

NATIVE = "is not {}: torch's own FSDP and tensor parallelism run the models of training.models"

log = logging.getLogger("training.llama_smp")


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    program = "python -m training.llama_smp"
    given = parse(FLAGS, arguments, program=program, about=str(__doc__), common=COMMON)
    faults = refused_flags(given)
    if faults:
        raise RequestError.of(faults)
    notes: list[str] = []
    settings = settings_of(given, KNOWN)
    settings |= _backend(given, notes)
    settings |= sharding_settings(given, notes, faults)
    settings |= data_settings(given, notes, faults)
    settings |= _others(given, settings, faults)
    faults += [*model.size_faults(given), *model.start_faults(given)]
    if faults:
        raise RequestError.of(faults)
    try:
        begin = model.start_of(given)
        settings |= {"init_weights": begin.init_weights, "init_hub": begin.init_hub}
        config = assemble(settings, {"name": begin.name, "sizes": begin.sizes})
    except RequestError as error:
        raise RequestError(renamed(str(error), names_for(arguments))) from error
    for note in notes:
        log.info(note)
    return config


def _backend(given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Choose the backend, and note the choice."""
    there = has_smp_library()
    backend = given["backend"] or ("smp" if there else "fsdp")
    own_layers, ranks = given["use_smp_implementation"], given["tensor_parallel_degree"]
    if backend == "fsdp":
        notes.append("torch.sagemaker " + NATIVE.format("used" if there else "installed"))
        return {"backend": backend}
    if ranks > 1 and not own_layers:
        notes.append(f"use_smp_implementation: 1, as {ranks} ranks share each layer")
    return {"backend": backend, "smp_transform": own_layers or ranks > 1}


def _others(given: dict[str, Any], settings: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """Return the settings that one or two flags of the system stand for."""
    url, scratch = given["checkpoint_dir"], given["checkpoint_scratch"]
    save = url
    if is_url(url):
        name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
        save = scratch or f"{tempfile.gettempdir()}/training-checkpoints-{name}"
        if given["save_final_model"] and not scratch and not given["model_dir"]:
            faults.append(
                f"--model_dir: must be given with save_final_model: {url} takes checkpoints alone, "
                "and the folder for temporary files is lost; fix: give a folder, or "
                "checkpoint_scratch"
            )
    elif scratch:
        faults.append("--checkpoint_scratch: has no effect unless checkpoint_dir is a URL")
    faults += [
        f"--{name}: {given[name]} is a URL; fix: give a folder"
        for name in ("resume_from_checkpoint", "model_dir")
        if is_url(given[name])
    ]
    final = given["model_dir"] or f"{save}/model"
    if given["model_dir"] and not given["save_final_model"]:
        faults.append("--model_dir: has no effect without save_final_model")
    has_evaluation = bool(settings.get("eval_dataset_path"))
    return {
        "save_ckpt_path": save,
        "mirror_url": url if is_url(url) else "",
        "precision": PRECISIONS[given["bf16"]],
        "schedule": given["lr_decay_style"],
        "tensorboard_tags": "smp" if given["tensorboard_dir"] else "own",
        "final_model_dir": final if given["save_final_model"] else "",
        "eval_batch_size": given["val_batch_size"] if has_evaluation else 0,
    }


if __name__ == "__main__":
    leave(enter(configure, sys.argv[1:], names_for(sys.argv[1:])))
