"""Pre-train Mamba-2 as the system for Neuron does: `torchrun ... -m training.mamba2_neuron ...`.

Runs on Neuron devices (--backend xla), on GPUs (nccl) and on CPUs (gloo), under torchrun on any
number of ranks, or alone. Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 85 stopped
by SIGTERM after a checkpoint (start it again), 86 ended by its watch because it made no progress.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.config.config import FSDP_ONLY, Config
from training.config.flags import (
    Flag,
    FlagAlias,
    assemble,
    names_of,
    parse,
    settings_of,
    with_ours,
)
from training.config.setting import boolean, integer, path
from training.data.how_to_read import how_to_read
from training.entrypoint import enter, leave, renamed
from training.errors import RequestError
from training.models import Mamba2Config
from training.parallel.neuron import environment
from training.systems import mamba2

DEVICES = {"xla": "xla", "nccl": "cuda", "gloo": "cpu"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
SIZES = ("d_model", "n_layer", "head_dim", "d_state", "n_groups")
"""Sizes that our own flags may set; 0 for the model's."""

KNOWN = (
    FlagAlias("seed", "seed", 100),
    FlagAlias("batch", "batch_size", 1),
    FlagAlias("tp", "tensor_parallel", 1),
    FlagAlias("use_zero_1", "zero1", False),
    FlagAlias("lr", "learning_rate", 4e-4),
    FlagAlias("weight_decay", "weight_decay", 0.01),
    FlagAlias("beta1", "beta1", 0.9),
    FlagAlias("beta2", "beta2", 0.999),
    FlagAlias("grad_clip", "grad_clip_thresh", 1.0),
    FlagAlias("max_steps", "num_steps", 0),
    FlagAlias("warmup_steps", "warmup_steps", 2000),
    FlagAlias("grad_accum_usteps", "gradient_accumulation", 1),
    FlagAlias("reset_documents", "reset_documents", False),
    FlagAlias("logging_interval", "report_interval", 1),
    FlagAlias("output_dir", "tensorboard_dir", "", ("tensorboard_dir",)),
)
COMMON = (
    *("model", "data_dir", "checkpoint_dir", "tag", "backend"),
    *("dtype", "batch", "tp", "lr", "max_steps"),
)
"""The most used flags, which help shows first."""
_OWN = {
    "model": (
        Flag("model", str, "Mamba130M", "which model", choices=tuple(mamba2.MODELS)),
        Flag("vocab_size", integer, 50272, "ids of tokens"),
        Flag("rmsnorm_across_groups", boolean, False,
             "take the gated norm's mean over all groups together"),
        Flag("d_model", integer, 0, "width of the residual stream; 0: the model's"),
        Flag("n_layer", integer, 0, "blocks; 0: the model's"),
        Flag("head_dim", integer, 0, "channels of a head; 0: 128"),
        Flag("d_state", integer, 0, "state size; 0: 128"),
        Flag("n_groups", integer, 0, "groups of heads that share B and C; 0: the model's"),
        Flag("chunk_size", integer, 128, "tokens per chunk; seq_len must be a multiple of it"),
        Flag("groups_as_tp", boolean, False, "as many groups as tp, as in the known program"),
    ),
    "parallel": (
        Flag("backend", str, "xla", "what computes: Neuron, GPUs or CPUs", choices=tuple(DEVICES)),
        Flag("dtype", str, "float32", "data type to compute in", choices=tuple(DTYPES)),
        Flag("no_optimizer_fp32", boolean, False, "bfloat16: no float32 weights beside"),
        Flag("sequence_parallel_enabled", boolean, False, "is not supported"),
    ),
    "data": (
        Flag("data_dir", path, "",
             "folder of a tokenized set, or a source of docs/training/data.md", ("dataset_path",)),
        Flag("seq_len", integer, 0, "tokens per sequence; 0: those of the set's rows"),
    ),
    "run": (
        Flag("checkpoint_dir", path, "./", "folder that has a folder for each tag"),
        Flag("tag", str, "exp", "name of the run"),
        Flag("checkpoint_freq", integer, 0, "steps between checkpoints; 0: at the end only"),
        Flag("num_kept_checkpoint", integer, -1, "newest checkpoints to keep, -1 for all"),
        Flag("save_last_step", boolean, True, "a checkpoint is always saved at the end"),
        Flag("checkpoint_load", boolean, False, "start from another run's newest checkpoint"),
        Flag("checkpoint_load_dir", path, None, "with that: folder of its tag (default: ./)"),
        Flag("checkpoint_load_tag", str, None, "with that: its tag (default: exp)"),
        Flag("debug", boolean, False, "is not supported: see trace_nan", short="d"),
        Flag("compile_cache", path, "", "xla: folder of graphs (default: in checkpoint_dir)"),
    ),
}  # fmt: skip
OWN = tuple(replace(flag, section=section) for section, some in _OWN.items() for flag in some)
TAKEN = {
    *FSDP_ONLY,
    *("backend", "device", "precision", "master_weights", "schedule", "dataset_path"),
    *("seq_length", "save_ckpt_path", "load_ckpt_path", "checkpoint_interval", "keep_checkpoints"),
    *("activation_loading_horizon", "compile_only"),
}
"""Our settings that flags of the system determine, or that this backend ignores."""

FLAGS = with_ours(OWN, KNOWN, TAKEN)
NAMES = names_of(
    KNOWN,
    seq_length="seq_len",
    dataset_path="data_dir",
    checkpoint_interval="checkpoint_freq",
    precision="dtype",
    device="backend",
    family="model",
)

INSTEAD = {"use_mix_precision": "write --dtype bfloat16, whose master weights are float32"}
"""A flag that the system's script may add but its program lacks -> what to do instead."""

log = logging.getLogger("training.mamba2_neuron")


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    program = "python -m training.mamba2_neuron"
    about = str(__doc__)
    given = parse(FLAGS, arguments, program=program, about=about, common=COMMON, instead=INSTEAD)
    faults = _refused(given)
    if faults:
        raise RequestError.of(faults)
    settings = settings_of(given, KNOWN) | _settings(given)
    try:
        sizes = _sizes(given)
        settings["seq_length"] = _length(given)
        return assemble(settings, {"name": given["model"], "sizes": sizes})
    except RequestError as error:
        raise RequestError(renamed(str(error), NAMES)) from error


def main(arguments: Sequence[str]) -> int:
    """Set Neuron's environment before torch reads it, and train; return the exit code."""

    def configured(arguments: Sequence[str]) -> Config:
        config = configure(arguments)
        if config.run.device == "xla":
            given = parse(FLAGS, arguments, program="", about="")
            cache = given["compile_cache"] or f"{given['checkpoint_dir']}/neuron_compile_cache"
            for note in environment.prepare(os.environ, Path(cache)):
                log.info(note)
        return config

    return enter(configured, arguments, NAMES)


def _refused(given: dict[str, Any]) -> list[str]:
    """List the flags that are missing, and those that this program does not support."""
    found = [f"--{name}: must be given" for name in ("data_dir", "max_steps") if not given[name]]
    if given["sequence_parallel_enabled"]:
        found.append("--sequence_parallel_enabled: is not supported; fix: leave it out")
    if given["debug"]:
        found.append(
            "--debug: is not supported; fix: use --trace_nan=True, which says where a NaN comes "
            "from"
        )
    if not given["save_last_step"]:
        found.append("--save_last_step: a checkpoint is always saved at the end; fix: leave it out")
    if not given["checkpoint_load"]:
        found += [
            f"--{name}: has no effect without --checkpoint_load; fix: give both, or neither"
            for name in ("checkpoint_load_dir", "checkpoint_load_tag")
            if given[name] is not None
        ]
    if given["compile_cache"] and given["backend"] != "xla":
        found.append(
            "--compile_cache: has no effect without --backend=xla, which alone compiles; fix: "
            "leave it out"
        )
    if given["groups_as_tp"] and given["n_groups"]:
        found.append("--groups_as_tp: says how many groups there are, and so does --n_groups")
    return found


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return our settings that flags of the system stand for."""
    load = Path(given["checkpoint_load_dir"] or "./") / (given["checkpoint_load_tag"] or "exp")
    return {
        "backend": "neuron",
        "device": DEVICES[given["backend"]],
        "precision": DTYPES[given["dtype"]],
        "master_weights": not given["no_optimizer_fp32"],
        "schedule": "cosine-to-zero",
        "dataset_path": given["data_dir"],
        "save_ckpt_path": str(Path(given["checkpoint_dir"]) / given["tag"]),
        "load_ckpt_path": str(load) if given["checkpoint_load"] else "",
        "checkpoint_interval": max(given["checkpoint_freq"], 0) or given["max_steps"],
        "keep_checkpoints": max(given["num_kept_checkpoint"], 0),
        "compile_only": environment.compiles_only(os.environ),
    }


def _sizes(given: dict[str, Any]) -> Mamba2Config:
    """Make the model's sizes, as changed by the flags. Raises RequestError."""
    changes = {name: given[name] for name in SIZES if given[name]}
    if given["groups_as_tp"]:
        changes["n_groups"] = given["tp"]
        log.info(
            "WARNING: groups_as_tp: the model has %d groups because tp is so; with another tp it "
            "is another model, whose checkpoints this one cannot read",
            given["tp"],
        )
    sizes = mamba2.sizes(
        given["model"], given["vocab_size"], norm_across_groups=given["rmsnorm_across_groups"]
    )
    if changes.keys() - {"n_groups"} and "n_groups" not in changes:
        changes["n_groups"] = 1  # any other number may not fit the changed heads
    return replace(sizes, chunk_size=given["chunk_size"], **changes)


def _length(given: dict[str, Any]) -> int:
    """Return the tokens of a sequence, a multiple of the chunk. Raises RequestError."""
    length: int = given["seq_len"]
    if not length:
        if not Path(given["data_dir"]).is_dir():
            if known := how_to_read(given["data_dir"]):
                raise RequestError(f"dataset_path: {known}")
            raise RequestError(
                f"seq_len: must be given, as {given['data_dir']} is not a folder of a tokenized "
                "set, which would state it"
            )
        from training.data.arrow import row_length

        try:
            length = row_length(given["data_dir"], given["dataset_split"])
        except RequestError as error:
            raise RequestError(f"dataset_path: {error}") from error
    if length % given["chunk_size"]:
        raise RequestError(
            f"seq_len: {length} is not a multiple of the chunk, {given['chunk_size']} "
            "(chunk_size); fix: tokenize into rows of such a length"
        )
    return length


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
