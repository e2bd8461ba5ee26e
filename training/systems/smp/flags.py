"""The flags of the program for SMP v2 (SageMaker's model parallel library, version 2).

Some of them can only ask for what is done anyway: other values are refused, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.flags import Flag, FlagAlias, names_of, with_ours
from training.config.setting import boolean, integer, path
from training.data.remote import is_url
from training.systems import llama
from training.systems.llama import COMMON_FLAGS, SCHEDULE_STYLES

FIXED = "taken for the system's own command lines"


@dataclass(frozen=True)
class FixedFlag:
    """A flag with some values that ask for what is done anyway; others are refused, with `why`."""

    name: str
    read: Callable[[str], Any]
    values: tuple[Any, ...]
    about: str
    why: str

    @property
    def flag(self) -> Flag:
        return Flag(self.name, self.read, None, self.about, section=FIXED)


FIXED_FLAGS = (
    FixedFlag("framework", str, ("fsdp",), "fsdp", "there is fsdp only"),
    FixedFlag(
        "distributed_backend",
        str,
        ("nccl",),
        "nccl: on GPUs (gloo on CPUs)",
        "ranks talk by nccl on GPUs and by gloo on CPUs",
    ),
    FixedFlag(
        "nccl_test_log", str, (), "not used", "no log of a network test is read; fix: leave it out"
    ),
    FixedFlag("data_type", str, ("gpt",), "gpt: the next token is learned", "there is gpt only"),
    FixedFlag(
        "auto_wrap_policy",
        str,
        ("transformer_auto_wrap_policy", "transformer"),
        "transformer_auto_wrap_policy: a block is what is sharded together",
        "a block is always what is sharded together",
    ),
    FixedFlag(
        "use_orig_params",
        boolean,
        (True,),
        "1: parameters keep their names and shapes",
        "parameters always keep their names and shapes; fix: use 1",
    ),
    FixedFlag(
        "patch_neox_rope",
        boolean,
        (True,),
        "1: rotary positions are right after a start on the meta device",
        "the models here have no other rotary positions; fix: use 1",
    ),
    FixedFlag(
        "use_smp_flash_attn",
        boolean,
        (True,),
        "1: attention never holds all its scores",
        "attention is the fastest that can run; TRAINING_OPS=attention=... chooses another",
    ),
    FixedFlag(
        "log_reduced_training_loss",
        boolean,
        (True,),
        "1: losses are means over all ranks",
        "losses are always means over all ranks; fix: use 1",
    ),
    FixedFlag(
        "preserve_np_state",
        boolean,
        (True, False),
        "either: validation draws no random numbers",
        "",
    ),
    FixedFlag(
        "fast_validation",
        boolean,
        (True,),
        "1: validation reads validation_batches from the start of the data",
        "validation reads validation_batches from the start of the data; 0 of these reads all",
    ),
    FixedFlag(
        "checkpoint_type",
        str,
        ("sharded",),
        "sharded: every rank writes its part, and any number of ranks can go on from it",
        "checkpoints are sharded: any number of ranks can go on from them",
    ),
)

SHARDING: dict[str, dict[str, Any]] = {
    "hybrid_shard": {"sharding_strategy": "hsdp"},
    "_hybrid_shard_zero2": {"sharding_strategy": "hsdp", "reshard_after_forward": False},
    "full_shard": {"sharding_strategy": "fsdp"},
    "shard_grad_op": {"sharding_strategy": "fsdp", "reshard_after_forward": False},
    "no_shard": {"sharding_strategy": "ddp"},
}
PREFETCH = {"backward_pre": "pre", "backward_post": "post"}
COMMON = (
    *("model_type", "model_size", "training_dir", "checkpoint_dir", "max_context_width"),
    *("train_batch_size", "lr", "max_steps", "sharding_strategy", "tensor_parallel_degree"),
)
"""The most used flags, which help shows first."""

KNOWN = (
    *COMMON_FLAGS,
    FlagAlias("tensor_parallel_degree", "tensor_parallel", 1),
    FlagAlias("delayed_param", "low_cpu_fsdp", True),
    FlagAlias("fp8", "fp8", True),
    FlagAlias("forward_prefetch", "forward_prefetch", True),
    FlagAlias("enable_memory_profiling", "track_memory", False),
    FlagAlias("profile_nsys", "use_nsight", False),
    FlagAlias("logging_freq_for_avg", "average_interval", 50),
    FlagAlias("lr_decay_iters", "lr_decay_iters", 47683),
    FlagAlias("data_num_workers", "num_workers", 0),
    FlagAlias("num_kept_checkpoints", "keep_checkpoints", 2),
    FlagAlias("checkpoint_freq", "checkpoint_interval", 1000),
)
LISTED = ("num_kept_checkpoints", "checkpoint_freq", "checkpoint_dir", "tensorboard_dir")


def _in(section: str, *flags: Flag) -> tuple[Flag, ...]:
    return tuple(replace(flag, section=section) for flag in flags)


SIZES = (
    *(
        replace(one, default=None, help=f"{one.help} (default: {one.default})")
        if one.default is not None
        else one
        for one in llama.FLAGS
    ),
    *_in(
        "model",
        Flag("num_local_experts", integer, None, "mixtral: experts of a layer (default: 8)"),
        Flag("num_experts_per_tok", integer, None, "mixtral: those that see a token (default: 2)"),
    ),
)
"""Without defaults, to distinguish what was given from what was not."""

OWN = (
    *_in(
        "model",
        Flag(
            "model_size",
            str,
            "",
            "7b, 13b, 20b, 65b or 70b: sizes, and shard_degree of hybrid sharding; flags count "
            "more",
        ),
        Flag("finetune", boolean, False, "start from given weights, by the four flags that follow"),
        Flag(
            "pretrained_model_name",
            path,
            "",
            "finetune: folder or name on the hub; gives the sizes",
        ),
        Flag(
            "finetune_checkpoint_load_dir",
            path,
            "",
            "finetune: folder of the weights; a model on the hub is fetched to it if it has none",
        ),
        Flag(
            "pretrained_checkpoint_file",
            path,
            "",
            "finetune: one file of weights, .safetensors or .bin; in the folder above, if given",
        ),
        Flag(
            "hf_pretrained_model_name_or_dir",
            path,
            "",
            "folder or name on the hub, of sizes and weights to start from",
        ),
    ),
    *_in(
        "parallel",
        Flag(
            *("backend", str, "", "what distributes the run (default: smp where it is, else fsdp)"),
            choices=("fsdp", "smp"),
        ),
        llama.BF16,
        Flag(
            *("sharding_strategy", str, "hybrid_shard", "what is sharded over which ranks"),
            choices=tuple(SHARDING),
        ),
        Flag(
            "shard_degree",
            integer,
            None,
            "data-parallel ranks that share a copy of the model; 0: as sharding_strategy says",
            ("hybrid_shard_degree",),
        ),
        Flag(
            "backward_fetch_policy",
            str,
            "backward_pre",
            "gather the next block's weights before or after a block's gradients",
            choices=tuple(PREFETCH),
        ),
        Flag(
            "use_smp_implementation",
            boolean,
            False,
            "the library's own layers; without the library those of training.models, and says so",
        ),
    ),
    *_in(
        "schedule",
        Flag(
            *("lr_decay_style", str, "cosine", "how the learning rate changes"),
            choices=SCHEDULE_STYLES,
        ),
    ),
    *_in(
        "data",
        Flag("use_synthetic_data", boolean, False, "train on random tokens"),
        Flag(
            "dataset_type",
            str,
            "gpt_jsonl",
            "gpt_jsonl: files of JSON lines; hf: a set on disk",
            choices=("gpt_jsonl", "hf"),
        ),
        Flag(
            "zipped_data",
            boolean,
            None,
            "gpt_jsonl: of a folder *.json.gz, or with 0 *.json (default: those that are there)",
        ),
        Flag(
            "training_dir",
            path,
            os.environ.get("SM_CHANNEL_TRAIN", ""),
            "folder of the data, SM_CHANNEL_TRAIN if not given; or a source of "
            "docs/training/data.md",
            ("dataset_path",),
        ),
        Flag(
            "test_dir",
            path,
            None,
            "folder of held-out data, with validation_freq SM_CHANNEL_TEST if not given",
            ("eval_dataset_path",),
        ),
    ),
    *_in(
        "run",
        Flag(
            "checkpoint_dir",
            path,
            "/opt/ml/checkpoints",
            "folder of the results, from whose newest checkpoint a run goes on; or a URL, s3://...",
        ),
        Flag(
            "checkpoint_scratch",
            path,
            "",
            "with a URL: folder that all nodes see, where checkpoints are written before they are "
            "copied (default: one for temporary files, for a single node)",
        ),
        Flag("save_final_model", boolean, False, "write the trained model to model_dir at the end"),
        Flag(
            "model_dir",
            path,
            "",
            "folder of the final model, in Hugging Face's format (default: CHECKPOINT_DIR/model; "
            "of a URL CHECKPOINT_SCRATCH/model, and without that it must be given)",
        ),
    ),
)
TAKEN = {
    *("precision", "schedule", "sharding_strategy", "reshard_after_forward", "shard_group_size"),
    *("backward_prefetch", "dataset_path", "eval_dataset_path"),
    *("init_weights", "init_hub", "final_model_dir", "tensorboard_tags"),
    *("backend", "smp_transform", "save_ckpt_path", "mirror_url"),
}
"""Our settings that flags of the system determine."""

_NAMES = names_of(
    KNOWN,
    schedule="lr_decay_style",
    precision="bf16",
    shard_group_size="shard_degree",
    reshard_after_forward="sharding_strategy",
    backward_prefetch="backward_fetch_policy",
    dataset_path="training_dir",
    eval_dataset_path="test_dir",
    final_model_dir="model_dir",
    save_ckpt_path="checkpoint_dir",
    mirror_url="checkpoint_dir",
    smp_transform="use_smp_implementation",
    **llama.NAMES,
)
"""Our name in errors -> the flag that was meant, whatever else was given."""
_MODEL = ("pretrained_model_name", "hf_pretrained_model_name_or_dir")
_WEIGHTS = ("pretrained_checkpoint_file", "finetune_checkpoint_load_dir", *_MODEL)
"""Flags that say where initial values are; the first one that is given counts."""


def names_for(arguments: Sequence[str]) -> dict[str, str]:
    """Return our names in errors -> the flags of this command line that were meant."""
    given: dict[str, str] = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        flag, is_whole, value = word.partition("=")
        given[flag.removeprefix("--")] = value if is_whole else following
    found = dict(_NAMES)
    for setting, flags in (("init_hub", _MODEL), ("init_weights", _WEIGHTS)):
        found[setting] = next((flag for flag in flags if given.get(flag)), flags[0])
    if is_url(given.get("checkpoint_dir", "")):
        found["save_ckpt_path"] = "checkpoint_scratch"
    return found


FLAGS = tuple(
    replace(flag, listed=flag.name in LISTED)
    for flag in with_ours((*SIZES, *OWN, *(one.flag for one in FIXED_FLAGS)), KNOWN, TAKEN)
)


def refused_flags(given: Mapping[str, Any]) -> list[str]:
    """List the flags that ask for what is not done here."""
    return [
        f"--{one.name}: {given[one.name]!r} is refused: {one.why}"
        for one in FIXED_FLAGS
        if given[one.name] is not None and given[one.name] not in one.values
    ]
