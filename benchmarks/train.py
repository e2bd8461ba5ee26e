"""What the training loop adds to the bare step of a model.

usage: python -m benchmarks.train [--rounds 21] [--small] [--output DIR]

In one process, on the CPU, under FSDP2, two things take turns with the same model and optimizer:
the loop (Trainer.turn: read ahead, vote, mark for the watch, collect and write metrics, report once
a turn) and the bare step (forward, loss, backward, clipping, optimizer; its batch is there
already). A round is 10 steps of one, then 10 of the other, in random order. The figure is the
median over the rounds of the ratio of the two, which are next to each other: a machine that others
use too drifts in minutes by more than the loop adds. The goal is 1.03.

Writes train.json to benchmarks/results/ and exits 1 where the goal is missed. Take a quiet machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.models import machine
from training.config.flags import assemble
from training.models import LlamaConfig, Mamba2Config, MambaConfig, Sizes, parameters
from training.parallel.optimizer import clip_gradients
from training.process_group import start, stop
from training.trainer.run import set_up
from training.trainer.trainer import Trainer

STEPS = 10
GOAL = 1.03
WARM = 3
SETTINGS = {"seq_length": 256, "batch_size": 4, "num_steps": 10**6}
MODELS: dict[str, Sizes] = {
    "mamba": MambaConfig(d_model=256, n_layer=4, vocab_size=256),
    "mamba2": Mamba2Config(d_model=256, n_layer=4, vocab_size=256),
    "llama": LlamaConfig(d_model=384, n_layer=6, vocab_size=256, n_head=6, n_kv_head=6, d_ff=1024),
}


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    steps = STEPS
    if given.small:
        given.rounds, steps = 1, 1
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    group = start("cpu")
    rows = []
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, sizes, Path(folder), given.rounds, steps, group))
        print(
            f"{name}: loop {rows[-1]['loop']:.4f} s, bare {rows[-1]['bare']:.4f} s a step, ", end=""
        )
        print(f"ratio {rows[-1]['ratio']:.4f}", flush=True)
    stop()
    met = all(row["ratio"] <= GOAL for row in rows)
    record = {"machine": machine(), "goal": GOAL, "met": met, "steps": rows}
    return options.finish(given, "train", record, met=met)


def measure(
    name: str, sizes: Sizes, folder: Path, rounds: int, steps: int, group: Any
) -> dict[str, Any]:
    """Time the loop and the bare step of one model in turns; seconds a step, medians."""
    text = f"text:{sysconfig.get_path('stdlib')}/*.py"
    settings = {
        **SETTINGS,
        "report_interval": steps,
        "dataset_path": text,
        "save_ckpt_path": str(folder),
    }
    trainer = set_up(assemble(settings, {"name": name, "sizes": sizes}), group)
    trainer.console.say = lambda text, file=None: None  # type: ignore[method-assign]
    ways: dict[str, Callable[[], object]] = {"loop": trainer.turn, "bare": bare(trainer)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    with trainer.phase, trainer.metrics:
        for step in ways.values():
            timed(step, WARM)
        for _ in range(rounds):
            for way in random.sample(list(ways), len(ways)):
                times[way].append(timed(ways[way], steps))
    trainer.data.close()
    median = {way: statistics.median(taken) for way, taken in times.items()}
    return {
        "model": name,
        "parameters": parameters(sizes),
        **median,
        "ratio": statistics.median(map(truediv, times["loop"], times["bare"])),
        "all": times,
    }


def bare(trainer: Trainer) -> Callable[[], object]:
    """Make the step that knows one batch only."""
    batch = trainer.data.next_batch()
    model, optimizer = trainer.model, trainer.optimizer
    threshold = trainer.config.optim.grad_clip_thresh

    def step() -> None:
        model(batch.inputs, batch.targets).backward()
        clip_gradients(model, threshold)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(way: Callable[[], object], steps: int) -> float:
    """Seconds a step."""
    since = time.perf_counter()
    for _ in range(steps):
        way()
    return (time.perf_counter() - since) / steps


if __name__ == "__main__":
    sys.exit(main())
