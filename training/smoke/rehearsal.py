"""A run of the smoke test, and its second half again, from the checkpoint in the middle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from training.errors import TrainingError

METRICS = "metrics.jsonl"
SIZES = {"seq_length": 128, "batch_size": 8, "learning_rate": 3e-3}
"""Defaults for a recipe: with these, mamba-tiny reaches 40% of its first loss in 80 steps."""
LAST = 5
"""How many steps at the end have their mean loss compared with the first loss."""
FIRST, LATER = 0.001, 0.05
"""By what share a loss of a resumed run may differ on a GPU, where kernels of libraries add up
gradients in no fixed order: at its first step, whose weights are equal, and later."""
TIMEOUT = 600.0
"""Seconds in which a run must have begun, or written its metrics again, even under an emulator: it
writes them sixteen times."""


class Rehearsal:
    """Runs the entry point as a user would, in processes of its own, in a temporary folder."""

    def __init__(self, train: dict[str, Any], folder: Path) -> None:
        self.settings = {**SIZES, **train}
        self.steps = int(train["steps"])
        self.ratio = float(train["loss_ratio"])
        self.whole, self.again = folder / "whole", folder / "again"

    def train(self) -> dict[str, Any]:
        """Train undisturbed. Raises TrainingError if the loss does not fall enough."""
        said = self._run(self.whole)
        losses = _losses(self.whole)
        end = sum(losses[-LAST:]) / LAST
        ratio = end / losses[0]
        figures = {
            "steps": len(losses),
            "first_loss": losses[0],
            "last_loss": end,
            "ratio": ratio,
            "loss_ratio": self.ratio,
            "losses": losses,
        }
        if len(losses) != self.steps:
            raise TrainingError(f"{len(losses)} of {self.steps} steps were trained: {said}")
        if not ratio < self.ratio:
            raise TrainingError(self.verdict(figures))
        return figures

    def verdict(self, figures: dict[str, Any]) -> str:
        """Say how far the loss fell."""
        return (
            f"loss {figures['first_loss']:.3f} -> {figures['last_loss']:.3f} in "
            f"{figures['steps']} steps: {figures['ratio']:.0%} of its start "
            f"(must be below {self.ratio:.0%})"
        )

    def resume(self, *, exact: bool = True) -> dict[str, Any]:
        """Start again from the checkpoint in the middle. Raises TrainingError if a loss differs.

        exact: if it differs at all; else at the first step by more than FIRST, later by LATER.
        """
        half = self._half
        name = f"step_{half}_ckp"
        source = self.whole / "checkpoints" / name
        if not source.is_dir():
            raise TrainingError(f"there is no checkpoint of step {half} to resume from")
        whole = _losses(self.whole)
        if len(whole) != self.steps:
            raise TrainingError(
                f"there is nothing to compare with: {len(whole)} of {self.steps} steps were trained"
            )
        shutil.copytree(source, self.again / "checkpoints" / name)
        self._run(self.again)
        expected, found = whole[half:], _losses(self.again)
        limits = [0.0] * len(expected) if exact else [FIRST, *[LATER] * (len(expected) - 1)]
        off = [abs(b - a) / a for a, b in zip(expected, found, strict=False)]
        repeated = [one <= most for one, most in zip(off, limits, strict=False)]  # nan never is
        first = repeated.index(False) if False in repeated else len(found)
        if first < len(expected):
            raise TrainingError(
                f"the losses of the resumed run differ from step {half + 1 + first} on"
            )
        return {"from": half + 1, "to": self.steps, "losses": found, "difference": max(off)}

    @property
    def _half(self) -> int:
        return self.steps // 2

    def _run(self, folder: Path) -> str:
        """Run the entry point; return its last line of output. Raises TrainingError if it fails."""
        s = self.settings
        command = [
            *(sys.executable, "-m", "training.mamba_fsdp"),
            f"--model_name={s['model_name']}",
            f"--dataset_path={s['dataset']}",
            f"--seq_length={s['seq_length']}",
            f"--batch_size={s['batch_size']}",
            f"--learning_rate={s['learning_rate']}",
            f"--num_steps={self.steps}",
            f"--report_interval={max(1, self.steps // 16)}",
            f"--checkpoint_interval={self._half}",
            f"--save_ckpt_path={folder}",
        ]
        # One process alone, whatever job the smoke test itself runs in.
        alone = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
        home = str(Path(__file__).parents[2])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {name: value for name, value in os.environ.items() if name not in alone}
        env["PYTHONPATH"] = os.pathsep.join(paths)
        # With the default spinning of GNU's OpenMP, a step takes ten times as long beside other
        # work, as on a login node; without other work this setting costs nothing.
        env.setdefault("GOMP_SPINCOUNT", "3000")
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            with subprocess.Popen(command, stdout=out, stderr=err, env=env) as process:
                code = _wait(process, folder / METRICS)
            said = (_text(err) or _text(out)).strip().splitlines()
        if code:
            end = said[-1] if said else "it said nothing"
            raise TrainingError(f"training ended with exit code {code}: {end}")
        return said[-1] if said else ""


def _wait(process: subprocess.Popen[bytes], metrics: Path) -> int:
    """Wait for a run to end; return its exit code. Raises TrainingError if it makes no progress."""
    size, since = -1, time.monotonic()
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            now = metrics.stat().st_size if metrics.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > TIMEOUT:
                process.kill()
                raise TrainingError(f"training has made no step in {TIMEOUT:.0f} s") from None


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _losses(folder: Path) -> list[float]:
    """Read the loss of every step, with all digits."""
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]
