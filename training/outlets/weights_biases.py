"""Weights & Biases: the reports and evaluations, under the names that its users know."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from wandb import Error, init

from training.config import Config, RunConfig
from training.errors import RequestError, writing
from training.outlets.outlet import Outlet, Record

FILE = "wandb.json"
KEYS = {
    "report": {
        "learning_rate": "learning rate",
        "loss": "loss",
        "grad_norm": "gradient norm",
        "tokens_seen": "token seen",
        "tokens_per_second_per_device": "throughput",
        "memory_bytes": "gpu memory",
        "mfu": "mfu",
    },
    "evaluation": {"loss": "evaluation loss", "perplexity": "perplexity"},
}
"""Kind of record -> its field -> the key. Steps are not sent one by one."""


class WeightsBiases(Outlet):
    """Sends records to one run, which takes none of a step that it has gone past."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, records: list[Record]) -> None:
        for record in records:
            keys = KEYS.get(record["kind"], {})
            if keys and record["step"] >= self._run.step:
                values = {key: record[name] for name, key in keys.items()}
                self._run.log(
                    {key: value for key, value in values.items() if value is not None},
                    step=record["step"],
                )

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def open_run(config: Config) -> WeightsBiases:
    """Begin a run, or go on with the one that SAVE/wandb.json or wandb_run_id names.

    Raises RequestError if W&B refuses, as without a key.
    """
    run = config.run
    path = Path(run.save_ckpt_path) / FILE
    try:
        opened = init(
            project=run.wandb_project,
            dir=run.wandb_dir or run.save_ckpt_path,
            id=_known_id(run, path),
            resume="allow",
            config=dataclasses.asdict(config),
        )
    except Error as error:
        raise RequestError(
            f"use_wandb: {error}; WANDB_MODE=offline keeps the run here for `wandb sync`"
        ) from error
    with writing(path):
        path.write_text(json.dumps({"id": opened.id, "project": run.wandb_project}) + "\n")
    return WeightsBiases(opened)


def _known_id(run: RunConfig, path: Path) -> str | None:
    """Find the id to go on with; None for a new one. Raises RequestError for a broken file."""
    if run.wandb_run_id or not path.exists():
        return run.wandb_run_id or None
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"use_wandb: {path} cannot be read; remove it for a new run, or give wandb_run_id"
        ) from error
