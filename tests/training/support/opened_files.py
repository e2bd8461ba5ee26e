"""A rank that reads some batches of each source, and reports which files it touched, and when.

usage: torchrun ... -m tests.training.support.opened_files FOLDER DATASET_PATH...

Writes FOLDER/opened-RANK.json: for each source {at_start, while_reading: file names; equal: whether
the batches are those of a rank that opened everything itself}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from training import process_group
from training.config.config import Config, DataConfig, ModelConfig, RunConfig
from training.data.shared import open_shared
from training.data.sources import open_data, open_feed
from training.models import preset

LENGTH, BATCH, BATCHES = 16, 2, 3


def config(path: str) -> Config:
    stream: dict[str, Any] = {"tokenizer": "bytes", "shuffle_buffer": 2}
    data = DataConfig(
        dataset_path=path,
        seq_length=LENGTH,
        batch_size=BATCH,
        prefetch=0,
        **(stream if path.startswith("stream:") else {}),
    )
    model = ModelConfig(name="mamba-tiny", sizes=preset("mamba-tiny"))
    return Config(model=model, data=data, run=RunConfig(save_ckpt_path="unused"))


def watch(folder: str, touched: list[str]) -> None:
    """Record each file of a folder that this process opens or stats."""

    def note(path: Any) -> None:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if name.startswith(folder) and Path(name).suffix:
            touched.append(Path(name).name)

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Any, *rest: Any, **named: Any) -> Any:
            note(path)
            return call(path, *rest, **named)

        return noted

    sys.addaudithook(lambda event, given: note(given[0]) if event == "open" else None)
    os.stat = noting(os.stat)  # type: ignore[assignment]
    pa.memory_map = noting(pa.memory_map)


def main() -> None:
    folder, *paths = sys.argv[1:]
    group = process_group.start("cpu")
    touched: list[str] = []
    watch(folder, touched)
    shown = []
    for path in paths:
        asked = config(path)
        touched.clear()
        source = open_shared(asked, "dataset_path", group)
        data = open_data(asked, source, group.rank, group.world_size, torch.device("cpu"))
        at_start = sorted(set(touched))
        touched.clear()
        batches = [data.next_batch() for _ in range(BATCHES)]
        while_reading = sorted(set(touched))
        data.close()
        alone = open_feed(asked, group.rank, group.world_size)
        expected = [alone.next_rows(range(BATCH)).rows for _ in range(BATCHES)]
        shown.append(
            {
                "path": path,
                "at_start": at_start,
                "while_reading": while_reading,
                "equal": all(
                    torch.equal(one.inputs, other.inputs)
                    and torch.equal(one.targets, other.targets)
                    for one, other in zip(batches, expected, strict=True)
                ),
                "same": data.feed.fingerprint == alone.fingerprint,
            }
        )
    Path(folder, f"opened-{group.rank}.json").write_text(json.dumps(shown))
    process_group.stop()


if __name__ == "__main__":
    main()
