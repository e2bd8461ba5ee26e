"""docs/reference/metrics.md: what a run logs, and the names that loggers show it under."""

from __future__ import annotations

from collections.abc import Mapping

from reference.markdown import code, page, prose, table
from training.loggers.records import RECORDS, WHEN
from training.loggers.tensorboard import TAGS
from training.loggers.wandb import KEYS

Names = Mapping[str, Mapping[str, str]]


def text() -> str:
    return page(
        "What a run logs",
        "training/loggers/",
        "Each line of `metrics.jsonl`, in the folder that a run saves to, is a JSON object; `kind` "
        "says which of these. TensorBoard (`tensorboard_dir`) and Weights & Biases (`use_wandb`) "
        "have the same values under the names beside them; "
        "[watching.md](../training/watching.md) says how to look at them.",
        *(block for kind in RECORDS for block in _kind(kind)),
    )


def _kind(kind: str) -> tuple[str, str, str]:
    shown: tuple[Names, ...] = (TAGS["own"], TAGS["smp"], KEYS)
    rows = [
        [code(name), prose(meaning), *(code(one.get(kind, {}).get(name, "")) for one in shown)]
        for name, meaning in RECORDS[kind].items()
    ]
    head = ["field", "meaning", "TensorBoard", "`tensorboard_tags=smp`", "Weights & Biases"]
    return f"## {kind}", f"There is one {WHEN[kind]}.", table(head, rows)
