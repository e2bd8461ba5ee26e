"""Every family, sharding and accumulation in one set of processes; run by test_matrix.

    torchrun --nproc_per_node=N -m tests.training.support.matrix TEXT SAVE

Writes SAVE/losses.json: name of the case -> losses of its steps.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from tests.training.support.curves import FAMILIES, GOLDEN
from tests.training.support.runs import ENGINES
from training.config.yaml import load
from training.entrypoint import leave
from training.process_group import Group, start, stop
from training.trainer.run import set_up

BALANCED = ("mixtral", "granitemoehybrid")
STEPS, GLOBAL_BATCH, LENGTH = 3, 8, 24
SHARDINGS = ("fsdp", "hsdp", "ddp")
CASES = {
    1: (("ddp", 1), ("fsdp", 2)),
    2: (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)),
    4: (("hsdp", 1), ("hsdp", 2), ("fsdp", 1)),
}
"""Shardings and accumulations, by number of ranks; two ranks have no groups of shards."""


def case(family: str, engine: str, sharding: str, accumulation: int) -> str:
    return f"{family} {engine} {sharding} x{accumulation}"


def losses(group: Group, data: str, save: Path, *changes: str, family: str) -> list[float]:
    """Train a few steps; returns the mean losses over all ranks."""
    settings = (
        f"dataset_path={data}",
        f"seq_length={LENGTH}",
        f"num_steps={STEPS}",
        f"save_ckpt_path={save}",
        *changes,
        # The experts' balance depends on the tokens that are seen together, so it is left out.
        *(("model.balance_coefficient=0",) if family in BALANCED else ()),
    )
    trainer = set_up(load(GOLDEN / f"{family}.yaml", settings), group)
    trainer.saver.save = lambda record: None  # type: ignore[method-assign]  # a third of the time
    trainer.run()
    lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def main(data: str, save: Path) -> None:
    group = start("cpu")
    found: dict[str, Any] = {}
    ways = product(FAMILIES, ENGINES, CASES[group.world_size])
    for family, engine, (sharding, accumulation) in ways:
        name = case(family, engine, sharding, accumulation)
        found[name] = losses(
            group,
            data,
            save / name.replace(" ", "-"),
            f"batch_size={GLOBAL_BATCH // group.world_size // accumulation}",
            f"gradient_accumulation={accumulation}",
            f"fsdp_engine={engine}",
            f"sharding_strategy={sharding}",
            f"shard_group_size={max(1, group.world_size // 2) if sharding == 'hsdp' else 0}",
            f"low_cpu_fsdp={accumulation == 2}",
            family=family,
        )
    if group.rank == 0:
        (save / "losses.json").write_text(json.dumps(found))
    group.barrier()
    stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    leave(0)
