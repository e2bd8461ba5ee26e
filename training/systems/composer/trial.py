"""A configuration to try out a cluster: a tiny Mamba on Python's own sources, byte by byte."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from training.data.packed import PackedWriter
from training.errors import RequestError, writing

DATA = "sources.npy"
FILES, BYTES = 60, 8192
"""Maximum number of files of the standard library, and of bytes from each."""
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 256, "d_model": 64, "n_layer": 2},
    "data": {
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "seq_len": 128,
        "num_workers": 0,
    },
    "optimizer": {"lr": 3e-3},
    "scheduler": {"name": "wsd", "t_warmup": "4ba", "t_max": "40ba", "t_decay": "8ba"},
    "trainer": {"save_interval": "10ba", "eval_interval": "40ba"},
    "general": {"full_name": "trial", "position_weighting": False},
}


def prepare(path: Path) -> None:
    """Write the file and its data beside it, unless the file exists. Raises TrainingError.

    Every rank of every node may do so at once: they write the same, and each file gets its name
    only when it is complete.
    """
    if path.exists():
        return
    folder = path.absolute().parent
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f".trial.{os.uname().nodename}.{os.getpid()}"
        own.mkdir()
    try:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]
        if not sources:
            raise RequestError("--trial: this Python has no sources of its library to train on")
        with PackedWriter(own / DATA) as packed:
            for source in sources:
                packed.write(list(source.read_bytes()[:BYTES]))
        data = {**SETTINGS["data"], "text_paths": [{"path": str(folder / DATA), "weight": 1.0}]}
        with writing(path):
            (own / path.name).write_text(yaml.safe_dump({**SETTINGS, "data": data}))
            for name in (f"{DATA}.size", DATA, path.name):
                (own / name).replace(folder / name)
    finally:
        shutil.rmtree(own, ignore_errors=True)
