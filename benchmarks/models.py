"""Measure the models' speed: on a CPU against their matrix products, on a GPU against references.

usage: python -m benchmarks.models [--rounds 5] [--small] [--output DIR]

On the CPU, for Mamba-130m and Mamba-2-130m: the time of a step (forward and backward, one sequence
of 512, fp32) over the time of the step's own matrix products: for every linear layer and the output
embedding, one in the forward pass and two in the backward pass. The two are timed alternately, and
the ratio is that of the medians. Memory is the peak during one step, in a process of its own, at
2048 over that at 512; and the same without what was in use before the step (the weights).
Then benchmarks/throughput.py runs: whole training steps beside the references. Without a GPU it
uses tiny models, which only checks that it works and is no result.

Writes models.json to benchmarks/results/ and exits 1 if a goal is missed. Use an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import options, throughput
from benchmarks.options import ROOT
from training.models import build, preset
from training.models.language import LanguageModel

MODELS = ("state-spaces/mamba-130m", "state-spaces/mamba2-130m")
SMALL = ("mamba-tiny", "mamba2-tiny")
LENGTH = 512
LONG = 2048
TIME_GOAL = 3.0  # x the time of the products
MEMORY_GOAL = 4.4  # x the memory at a quarter of the length


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "LENGTH"), help=argparse.SUPPRESS)
    given = options.parse(parser)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    if given.peak:
        print(json.dumps(peak(given.peak[0], int(given.peak[1]))))
        return 0
    result: dict[str, Any] = {"machine": machine(), "steps": [], "met": True}
    for name in SMALL if given.small else MODELS:
        row = measure(name, 1 if given.small else given.rounds)
        result["steps"].append(row)
        result["met"] &= row["time_met"] and row["memory_met"]
        print(
            f"{name}: step {row['step']:.2f} s, its products {row['products']:.2f} s: "
            f"{row['ratio']:.2f} x (goal: {TIME_GOAL}); memory at {LONG} over {LENGTH}: "
            f"{row['memory_ratio']:.2f} x, without the weights {row['growth']:.2f} x "
            f"(goal: {MEMORY_GOAL})",
            flush=True,
        )
    steps, runs = (2, throughput.TINY) if given.small else (10, None)
    result["training"] = throughput.compare(steps, runs)
    return options.finish(given, "models", result, met=result["met"])


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Time a model's step and its products alternately, and measure its peaks of memory."""
    model, tokens = filled(name), text(name, LENGTH)
    products = Products(model, LENGTH)
    for work in (products.run, lambda: step(model, tokens)):
        work()  # the first run takes longer
    times = [(timed(products.run), timed(lambda: step(model, tokens))) for _ in range(rounds)]
    least, whole = (statistics.median(column) for column in zip(*times, strict=True))
    (short, before), (long, _) = (peak_of(name, length) for length in (LENGTH, LONG))
    growth = (long - before) / (short - before)
    return {
        "model": name,
        "length": LENGTH,
        "products": round(least, 3),
        "step": round(whole, 3),
        "rounds": [[round(one, 3) for one in pair] for pair in times],
        "ratio": round(whole / least, 2),
        "time_met": whole <= TIME_GOAL * least,
        "memory": {str(LENGTH): short, str(LONG): long, "before the step": before},
        "memory_ratio": round(long / short, 2),
        "growth": round(growth, 2),
        "memory_met": growth <= MEMORY_GOAL,
    }


class Products:
    """The matrix products of one step, on random numbers."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
        self.sizes = [(layer.in_features, layer.out_features) for layer in layers]
        widths = {width for pair in self.sizes for width in pair}
        self.rows = {width: torch.randn(rows, width) for width in widths}  # (rows, width)
        self.weights = {pair: torch.randn(pair[1], pair[0]) for pair in self.sizes}  # (out, in)

    def run(self) -> None:
        for pair in self.sizes:
            x, dy, weight = self.rows[pair[0]], self.rows[pair[1]], self.weights[pair]
            x @ weight.t(), dy @ weight, dy.t() @ x  # (rows, out), (rows, in), (out, in)


def filled(name: str) -> LanguageModel:
    model = build(preset(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(model.initial(key, parameter.shape, seed=1))
    return model


def text(name: str, length: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    vocabulary = min(preset(name).vocab_size, 50277)
    return torch.randint(vocabulary, (1, length + 1), generator=random)  # (1, length + 1)


def step(model: LanguageModel, tokens: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(tokens[:, :-1], tokens[:, 1:]).backward()


def timed(work: Any) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def peak_of(name: str, length: int) -> tuple[int, int]:
    """Run `peak` in a process of its own: (bytes at the peak, bytes before the step)."""
    argv = [sys.executable, "-m", "benchmarks.models", "--small", "--peak", name, str(length)]
    asked = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(asked.stdout)
    return found["peak"], found["before"]


def peak(name: str, length: int) -> dict[str, int]:
    """Return resident memory before a step, and its peak during the step, in bytes (Linux)."""
    model, tokens = filled(name), text(name, length)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    step(model, tokens)
    return {"before": before, "peak": resident("VmHWM")}


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def machine() -> dict[str, Any]:
    return {
        "processor": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    options.run(main)
