"""Weights & Biases: the reports and evaluations, under the names that its users know."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from wandb import Error, init

from training.config.config import Config
from training.errors import RequestError, writing
from training.loggers.base import Logger, Record

FILE = "wandb.json"
FINISH_TIMEOUT = "600"
"""Seconds to wait for a server at the end; the other ranks wait too, for half an hour at most."""
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
    "evaluation": {
        "loss": "evaluation loss",
        "perplexity": "perplexity",
        "top3": "top-3 accuracy",
        "top10": "top-10 accuracy",
    },
}
"""Kind of record -> its field, if present -> the key, which follows an evaluation's label if any.

Steps are not sent one by one.
"""


class WeightsBiases(Logger):
    """Sends records to one run, which accepts none of a step that it has passed."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, records: list[Record]) -> None:
        for record in records:
            keys = KEYS.get(record["kind"], {})
            if keys and record["step"] >= self._run.step:
                label = f"{record['label']}: " if "label" in record else ""
                values = {
                    f"{label}{key}": record[name]
                    for name, key in keys.items()
                    if record.get(name) is not None
                }
                self._run.log(values, step=record["step"])

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def open_run(config: Config) -> WeightsBiases:
    """Begin a run, or go on with the one that SAVE/wandb.json or wandb_run_id names.

    Raises RequestError if W&B refuses, for example without a key.
    """
    run = config.run
    return begin(
        Path(run.save_ckpt_path),
        dataclasses.asdict(config),
        run_id=run.wandb_run_id,
        project=run.wandb_project,
        dir=run.wandb_dir or run.save_ckpt_path,
    )


def begin(
    folder: Path, settings: dict[str, Any], *, run_id: str = "", project: str, **options: Any
) -> WeightsBiases:
    """Begin a run of these settings, or go on with the one that FOLDER/wandb.json or run_id names.

    options: for wandb.init. What a server does not accept at the end within WANDB_FINISH_TIMEOUT
    stays here for `wandb sync`. Raises RequestError if W&B refuses, for example without a key, or
    does not answer within its own limit (90 s, WANDB_INIT_TIMEOUT).
    """
    path = folder / FILE
    # A variable rather than a setting of init, which older releases would refuse.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", FINISH_TIMEOUT)
    try:
        opened = init(
            project=project,
            id=_known_id(run_id, path),
            resume="allow",
            config=settings,
            **options,
        )
    except (Error, ValueError) as error:  # ValueError: a variable of W&B has an invalid value
        reason = " ".join(str(error).split())
        raise RequestError(
            f"use_wandb: {reason}; fix: set WANDB_MODE=offline, which keeps the run here for "
            "`wandb sync`"
        ) from error
    with writing(path):
        path.write_text(json.dumps({"id": opened.id, "project": project}) + "\n")
    return WeightsBiases(opened)


def _known_id(run_id: str, path: Path) -> str | None:
    """Find the id of the run to go on with; None for a new run. Raises RequestError."""
    if run_id or not path.exists():
        return run_id or None
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"use_wandb: {path} cannot be read; fix: remove it for a new run, or give wandb_run_id"
        ) from error
