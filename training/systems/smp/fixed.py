"""Flags of the program for SMP v2 that can only ask for what is done anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training.config.flags import Flag
from training.config.setting import boolean


@dataclass(frozen=True)
class Fixed:
    """A flag of which some values ask for what is done anyway; others are refused, told why."""

    name: str
    read: Callable[[str], Any]
    values: tuple[Any, ...]
    about: str
    why: str

    @property
    def flag(self) -> Flag:
        return Flag(self.name, self.read, None, self.about)


FIXED = (
    Fixed("framework", str, ("fsdp",), "fsdp", "there is fsdp only"),
    Fixed(
        "distributed_backend",
        str,
        ("nccl",),
        "nccl: on GPUs (gloo on CPUs)",
        "ranks talk by nccl on GPUs and by gloo on CPUs",
    ),
    Fixed("nccl_test_log", str, (), "not heeded", "no log of a network test is read; leave it out"),
    Fixed("data_type", str, ("gpt",), "gpt: the next token is learned", "there is gpt only"),
    Fixed(
        "auto_wrap_policy",
        str,
        ("transformer_auto_wrap_policy", "transformer"),
        "transformer_auto_wrap_policy: a block is what is sharded together",
        "a block is always what is sharded together",
    ),
    Fixed(
        "use_orig_params",
        boolean,
        (True,),
        "1: parameters keep their names and shapes",
        "parameters always keep their names and shapes; use 1",
    ),
    Fixed(
        "patch_neox_rope",
        boolean,
        (True,),
        "1: rotary positions are right after a start on the meta device",
        "the models here have no other rotary positions; use 1",
    ),
    Fixed(
        "use_smp_flash_attn",
        boolean,
        (True,),
        "1: attention never holds all its scores",
        "attention is the fastest that can run; TRAINING_OPS=attention=... chooses another",
    ),
    Fixed(
        "log_reduced_training_loss",
        boolean,
        (True,),
        "1: losses are means over all ranks",
        "losses are always means over all ranks; use 1",
    ),
    Fixed(
        "preserve_np_state",
        boolean,
        (True, False),
        "either: validation draws no random numbers",
        "",
    ),
    Fixed(
        "fast_validation",
        boolean,
        (True,),
        "1: validation reads validation_batches from the start of the data",
        "validation reads validation_batches from the start of the data; 0 of these reads all",
    ),
    Fixed(
        "checkpoint_type",
        str,
        ("sharded",),
        "sharded: every rank writes its part, and any number of ranks can go on from it",
        "checkpoints are sharded: any number of ranks can go on from them",
    ),
)


def refused(given: Mapping[str, Any]) -> list[str]:
    """List the flags that ask for what is not done here."""
    return [
        f"--{one.name}: {one.why}, not {given[one.name]!r}"
        for one in FIXED
        if given[one.name] is not None and given[one.name] not in one.values
    ]
