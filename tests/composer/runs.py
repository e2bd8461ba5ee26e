"""Start training.mamba_composer for real, alone or with Composer's launcher, and write its data."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.support import warm
from tests.training.support.runs import ROOT, kill_tree
from training.data.packed import PackedWriter

ENTRY_POINT = ("-m", "training.mamba_composer")
PROGRAM = (str(Path(__file__).with_name("several.py")),)
"""Runs several trainings, one after the other; see there."""
LAUNCHER = str(Path(sys.executable).with_name("composer"))
WARM_LAUNCHER = str(Path(__file__).with_name("launcher.py"))


def write_packed(folder: Path) -> None:
    """Pack the standard library's sources as bytes: text.npy, code.npy and held.npy."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for name, part in (("text", files[:20]), ("code", files[20:40]), ("held", files[60:70])):
        with PackedWriter(folder / f"{name}.npy") as packed:
            for number, file in enumerate(part):
                ids = list(file.read_bytes()[: 2000 + 577 * number])
                packed.write(ids, [at % (2 + number) != 0 for at in range(len(ids))])


def settings(data: Path, save: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a small run; a change is section__key=value."""
    found: dict[str, Any] = {
        "model": {"vocab_size": 256, "d_model": 32, "n_layer": 2},
        "data": {
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "eval_batch_size": 4,
            "seq_len": 32,
            "num_workers": 0,
            "text_paths": [{"path": f"{data}/text.npy", "weight": 0.6, "order": 3}],
            "code_paths": [{"path": f"{data}/code.npy", "weight": 0.4}],
        },
        "optimizer": {"lr": 3e-3},
        "scheduler": {"name": "wsd", "t_warmup": "2ba", "t_max": "6ba", "t_decay": "2ba"},
        "trainer": {"save_interval": "100ba", "save_folder": str(save)},
        "general": {"full_name": "tiny", "position_weighting": True},
    }
    for place, value in changes.items():
        section, _, key = place.partition("__")
        found[section][key] = value
    return found


def write(path: Path, settings: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@contextmanager
def started(
    ranks: int,
    *arguments: str,
    cwd: Path | None = None,
    given: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[str]]:
    """Start a Python program on `ranks` ranks, 0: plain python; nothing of it outlives the block.

    given: environment variables, which may include those of tests.support.warm.
    """
    python = given.get("PYTHON_EXEC", "")
    launcher = [python, WARM_LAUNCHER] if python else [LAUNCHER]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WANDB_") and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    process = subprocess.Popen(
        [*launcher, "-n", str(ranks), *arguments]
        if ranks
        else [python or sys.executable, *arguments],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given},
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        kill_tree(process)
        process.communicate()


def run(
    ranks: int,
    *arguments: str,
    cwd: Path | None = None,
    program: Sequence[str] = ENTRY_POINT,
    given: Mapping[str, str] = MappingProxyType({}),
    cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with warm processes, or with cold ones as users have them."""
    given = given if cold else {**warm.python(), **given}
    with started(ranks, *program, *arguments, cwd=cwd, given=given) as process:
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
