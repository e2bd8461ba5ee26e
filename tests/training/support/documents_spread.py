"""Rows of documents on ranks that share a model, compared with single documents on a whole model.

    torchrun --nproc_per_node=N -m tests.training.support.documents_spread

Every rank has rows of its own. Their logits, and the means over ranks of the gradients, are
compared with those of the whole model on each document by itself: for each family, engine and way
of sharing that needs this many ranks, recomputed or not. Writes a line for each case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.training.support.documents import (
    FAMILIES,
    WITHIN,
    Outcome,
    alone,
    cut,
    difference,
    gradients,
    together,
)
from tests.training.support.families import filled
from tests.training.support.runs import ENGINES
from training import compat
from training.config.config import Config, DataConfig, ModelConfig, ParallelConfig, RunConfig
from training.entrypoint import leave
from training.models import Mamba2Config, Sizes
from training.parallel.backend import find_backend
from training.parallel.neuron.places import place
from training.process_group import start, stop

LENGTH = 40
SHARED = Mamba2Config(
    **{"d_model": 32, "n_layer": 2, "vocab_size": 64, "d_state": 16},  # type: ignore[arg-type]
    **{"head_dim": 8, "n_groups": 4},  # type: ignore[arg-type]
)
"""Sizes that the Neuron backend can share, including the vocabulary."""


def cases(ranks: int) -> Iterator[tuple[str, Sizes, dict[str, Any]]]:
    for name, sizes in FAMILIES.items():
        for engine in ENGINES if ranks <= 2 else ():
            recomputed = {"fsdp_engine": engine, "fsdp_activation_checkpointing": True}
            yield f"{name} {engine}", sizes, {"fsdp_engine": engine}
            yield f"{name} {engine} recomputed", sizes, recomputed
        if ranks > 1 and "fsdp2" in ENGINES and name not in ("mamba", "gpt_neox"):
            yield f"{name} tensor", sizes, {"tensor_parallel": 2}
    for degree in (1, 2, 4):
        if ranks // 2 <= degree <= ranks:
            yield f"neuron {degree}", SHARED, {"backend": "neuron", "tensor_parallel": degree}


def main() -> None:
    world = start("cpu")
    for name, sizes, parallel in cases(world.world_size):
        config = settings(sizes, parallel)
        group = replace(world, tensor_parallel=config.parallel.tensor_parallel)
        shared = find_backend(config.parallel.backend).build(config, group, None)
        rows = rows_of(group.data_world_size)
        found = together(shared, rows[group.data_rank], group.data_rank)[0]  # (b, l, v)
        wanted = expected(sizes, group.data_world_size)
        logits, own = wanted[group.data_rank]
        mean = {key: torch.stack([one[1][key] for one in wanted]).mean(0) for key in own}
        pair = neuron(shared, sizes, own) if "backend" in parallel else fsdp(shared, mean)
        apart = difference((found, pair[0]), (logits, pair[1]))
        assert apart <= WITHIN, f"{name}: {apart}"
        if group.rank == 0:
            print(f"{name}: {apart:.1e}", flush=True)
        group.barrier()
    stop()


def rows_of(ranks: int) -> list[list[list[int]]]:
    """Return the lengths of the documents in each rank's rows."""
    random = torch.Generator().manual_seed(7)
    return [[cut(random, LENGTH, 12) for _ in range(2)] for _ in range(ranks)]


@cache  # most cases of a family have the same rows
def expected(sizes: Sizes, ranks: int) -> list[Outcome]:
    """Return each rank's logits and gradients, by the whole model on each document by itself."""
    return [alone(filled(sizes, 5), one, seed) for seed, one in enumerate(rows_of(ranks))]


Pair = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Gradients by name: of the shared model, and of the whole one."""


def fsdp(model: nn.Module, mean: dict[str, Tensor]) -> Pair:
    if not isinstance(model, FullyShardedDataParallel):
        found = {name: compat.full_value(one) for name, one in gradients(model).items()}
        return found, mean
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        found = gradients(model)
    return {name.replace("_fsdp_wrapped_module.", ""): one for name, one in found.items()}, mean


def neuron(model: Any, sizes: Any, own: dict[str, Tensor]) -> Pair:
    """A rank has the gradients of its part; only the optimizer averages them over the ranks."""
    parts = {name: place(name, sizes, model.ranks.tensor) for name, _ in model.named_parameters()}
    return gradients(model), {name: one.of(own[one.name]) for name, one in parts.items()}


def settings(sizes: Sizes, parallel: dict[str, Any]) -> Config:
    return Config(
        model=ModelConfig(name="try", sizes=sizes),
        data=DataConfig(dataset_path="synthetic:"),
        run=RunConfig(save_ckpt_path="none", device="cpu", seed=5),
        parallel=ParallelConfig(**parallel),
    )


if __name__ == "__main__":
    main()
    leave(0)
