"""Pre-train Mamba or its hybrids with FSDP: `torchrun ... -m training.mamba_fsdp --flag=value`.

Runs under torchrun on any number of ranks, or alone under plain python. Exit codes: 0 done, 1 the
run failed, 2 the request was wrong, 85 stopped by SIGTERM after a checkpoint (start it again),
86 ended by its watch because it made no progress.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from training.config.config import Config
from training.config.flags import Flag, FlagAlias, assemble, parse, with_ours
from training.config.setting import integer
from training.entrypoint import enter, leave
from training.models import preset

KNOWN = (
    # Aliases are from the system's document; the names before them are its program's.
    FlagAlias("save_ckpt_path", "save_ckpt_path", "", ("ckpt_save_path",)),
    FlagAlias("load_ckpt_path", "load_ckpt_path", "", ("ckpt_load_path",)),
    FlagAlias("reset_documents", "reset_documents", False),
)

VARIANT = ("model_variant",)
"""fms-fsdp's name of model_name; its mamba_9.8b is a name here too."""

COMMON = (
    *("model_name", "dataset_path", "save_ckpt_path", "seq_length", "batch_size"),
    *("learning_rate", "num_steps", "report_interval", "checkpoint_interval", "sharding_strategy"),
)
"""The most used flags, which help shows first."""

_UNREAD = "nothing reads it, here or in the system; fix: leave it out"
INSTEAD = {
    "mixed_precision": "write --precision=bf16, or fp32 (auto: bf16 on a GPU that has it)",
    **dict.fromkeys(("sep_token", "datasets", "weights", "logical_shards"), _UNREAD),
}
"""Settings of the system's file that have no flag here -> what to do instead."""

OWN = (
    Flag("model_name", str, "state-spaces/mamba-130m", "which model, by its name", VARIANT),
    Flag("vocab_size", integer, 0, "ids of tokens; 0: the model's", section="model"),
)
FLAGS = with_ours(OWN, KNOWN, ())


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    program = "python -m training.mamba_fsdp"
    about = str(__doc__)
    given = parse(FLAGS, arguments, program=program, about=about, common=COMMON, instead=INSTEAD)
    name, vocabulary = given.pop("model_name"), given.pop("vocab_size")
    sizes = preset(name)
    if vocabulary:
        sizes = replace(sizes, vocab_size=vocabulary)
    return assemble(given, {"name": name, "sizes": sizes})


if __name__ == "__main__":
    leave(enter(configure, sys.argv[1:]))
