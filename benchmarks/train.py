"""Measure what the training loop adds to a model's bare step, and what documents add to the loop.

usage: python -m benchmarks.train [--rounds 21] [--small] [--output DIR]

In one process, on the CPU, under FSDP2, two things alternate with the same model and optimizer:
the loop (Trainer.turn: read ahead, vote, mark for the watch, collect and write metrics, report once
a turn) and the bare step (forward, loss, backward, clipping, optimizer; its batch is already
loaded). A round is 10 steps of each, in random order. The figure is the median over the rounds of
the ratio of the two neighboring times, because a shared machine drifts within minutes by more than
the loop adds. The goal is 1.03.

In the same way two loops alternate on the same packed documents, of 1 to 127 tokens: one with
reset_documents, for which nearly every chunk of a row has a boundary in it, and one without. The
goal is 1.03 too.

Writes train.json to benchmarks/results/ and exits 1 if the goal is missed. Use an otherwise idle
machine.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import truediv
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.models import machine
from training.config.flags import assemble
from training.data.packed import PackedWriter
from training.models import LlamaConfig, Mamba2Config, MambaConfig, Sizes, parameters
from training.parallel.optimizer import clip_gradients
from training.process_group import start, stop
from training.trainer.run import set_up
from training.trainer.trainer import Trainer

STEPS = 10
GOAL = 1.03
WARM = 3
LONGEST = 127
"""Tokens of the longest document; the mean is 64."""
STDLIB = Path(sysconfig.get_path("stdlib"))
SETTINGS = {"seq_length": 256, "batch_size": 4, "num_steps": 10**6}
MODELS: dict[str, Sizes] = {
    "mamba": MambaConfig(d_model=256, n_layer=4, vocab_size=256),
    "mamba2": Mamba2Config(d_model=256, n_layer=4, vocab_size=256),
    "llama": LlamaConfig(d_model=384, n_layer=6, vocab_size=256, n_head=6, n_kv_head=6, d_ff=1024),
}


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    given = options.parse(parser)
    steps, warm = STEPS, WARM
    if given.small:
        given.rounds, steps, warm = 1, 1, 1
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    group = start("cpu")
    found: dict[str, list[dict[str, Any]]] = {"steps": [], "documents": []}
    for name, sizes in MODELS.items():
        for what, make in (("steps", of_the_loop), ("documents", of_documents)):
            with tempfile.TemporaryDirectory() as folder:
                with make(name, sizes, Path(folder), steps, group) as ways:
                    found[what].append(measure(name, sizes, ways, given.rounds, steps, warm))
                print(summary(found[what][-1]), flush=True)
    stop()
    met = all(row["ratio"] <= GOAL for rows in found.values() for row in rows)
    record = {"machine": machine(), "goal": GOAL, "met": met, **found}
    return options.finish(given, "train", record, met=met)


Ways = dict[str, Callable[[], object]]
"""Two ways to take a step, by name; the first is compared with the second."""


def measure(
    name: str, sizes: Sizes, ways: Ways, rounds: int, steps: int, warm: int
) -> dict[str, Any]:
    """Time two ways alternately, after `warm` steps of each; returns median seconds per step."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step in ways.values():
        timed(step, warm)
    for _ in range(rounds):
        for way in random.sample(list(ways), len(ways)):
            times[way].append(timed(ways[way], steps))
    median = {way: statistics.median(taken) for way, taken in times.items()}
    return {
        "model": name,
        "parameters": parameters(sizes),
        **median,
        "ratio": statistics.median(map(truediv, *times.values())),
        "all": times,
    }


def summary(row: dict[str, Any]) -> str:
    ways = ", ".join(f"{way} {row[way]:.4f} s" for way in row["all"])
    return f"{row['model']}: {ways} a step, ratio {row['ratio']:.4f}"


@contextmanager
def of_the_loop(name: str, sizes: Sizes, folder: Path, steps: int, group: Any) -> Iterator[Ways]:
    """Yield a turn of the loop and a bare step of the same model."""
    text = f"text:{STDLIB}/*.py"
    with looping(name, sizes, folder, text, steps, group) as trainer:
        yield {"loop": trainer.turn, "bare": bare(trainer)}


@contextmanager
def of_documents(name: str, sizes: Sizes, folder: Path, steps: int, group: Any) -> Iterator[Ways]:
    """Yield turns of two loops on the same packed documents, with and without reset_documents."""
    text = b"".join(path.read_bytes() for path in sorted(STDLIB.glob("*.py"))[:40])
    lengths = random.Random(1)
    with PackedWriter(folder / "short.npy") as packed:
        at = 0
        while at < len(text):
            size = lengths.randint(1, LONGEST)
            packed.write(list(text[at : at + size]))
            at += size
    data = f"packed:{folder}/short.npy"
    with ExitStack() as stack:
        ways: Ways = {}
        for way, resets in (("reset", True), ("plain", False)):
            made = looping(name, sizes, folder / way, data, steps, group, reset_documents=resets)
            ways[way] = stack.enter_context(made).turn
        yield ways


@contextmanager
def looping(
    name: str, sizes: Sizes, folder: Path, data: str, steps: int, group: Any, **more: Any
) -> Iterator[Trainer]:
    """Set up a run that reports once every `steps` steps, and prints nothing."""
    settings = {
        **SETTINGS,
        "report_interval": steps,
        "dataset_path": data,
        "save_ckpt_path": str(folder),
        **more,
    }
    trainer = set_up(assemble(settings, {"name": name, "sizes": sizes}), group)
    trainer.console.say = lambda text, file=None: None  # type: ignore[method-assign]
    try:
        with trainer.phase, trainer.metrics:
            yield trainer
    finally:
        trainer.data.close()


def bare(trainer: Trainer) -> Callable[[], object]:
    """Make a step that uses the same batch every time."""
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
    """Return the seconds per step."""
    since = time.perf_counter()
    for _ in range(steps):
        way()
    return (time.perf_counter() - since) / steps


if __name__ == "__main__":
    options.run(main)
