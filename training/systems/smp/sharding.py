"""How the model is spread, by the flags of SMP v2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.systems.smp.flags import PREFETCH, SHARDING
from training.systems.smp.model import SHARD_DEGREES

HYBRID = "hybrid_shard"


def settings(given: Mapping[str, Any], notes: list[str], faults: list[str]) -> dict[str, Any]:
    """Give the settings of ours that the flags mean.

    With a shard_degree the sharding is hybrid, in groups of so many data-parallel ranks, each of
    which is a tensor group. To `notes` is added what the user should be told, to `faults` what is
    wrong.
    """
    strategy, degree = given["sharding_strategy"], given["shard_degree"]
    if degree is None:
        degree = SHARD_DEGREES.get(given["model_size"], 0)
        if degree:
            notes.append(f"shard_degree: {degree}, that of model_size {given['model_size']}")
    if degree < 0:
        faults.append(f"--shard_degree: must be from 0 to the number of ranks, is {degree}")
    if degree > 0 and SHARDING[strategy]["sharding_strategy"] != "hsdp":
        notes.append(f"sharding_strategy: {HYBRID}, not {strategy}, as shard_degree is {degree}")
        strategy = HYBRID
    found = {**SHARDING[strategy], "backward_prefetch": PREFETCH[given["backward_fetch_policy"]]}
    if degree > 0:
        found["shard_group_size"] = degree * given["tensor_parallel_degree"]
    return found
