"""Measure how long training stands still for a checkpoint, and how long reading it again takes.

usage: python -m benchmarks.save [--model NAME] [--interval 10] [--saves 5] [--small] [--output DIR]

Trains Mamba-130m with its own entry point on two processes (FSDP2, gloo), one sequence of 128 each,
with async_checkpoint=True and then False, each with and without checkpoint_in_memory, and reads
what the runs report. For each kind of run:

stall         seconds from the beginning of a save until training continues, the median over the
              saves (the one after the last step, for which a run must wait, does not count)
step          seconds of a step, the median over those during which nothing was saved or written
share         the stall over the time of the steps between two checkpoints (interval x step)
slower        seconds by which the steps took longer while a checkpoint was written, without the
              stall, the median over the saves: on a CPU, writing competes with the steps
written       seconds from the beginning of a save to the complete checkpoint, the median

Then new processes read the last checkpoint, as a restart in place does, and compare it with its
manifest: `read` has the seconds of each read, from the copies in memory, from the file system while
its files are in the page cache, and after they have been dropped from it (not possible on a tmpfs).

Goal: in the background the share is at most 5 %. A real run saves at many times this interval, so
its share is smaller by the same factor. Writes save.json to benchmarks/results/ and exits 1 if the
goal is missed. Use an otherwise idle machine.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.models import machine
from tests.support import page_cache
from tests.training.support.runs import THREADS, run
from training import manifest
from training.checkpoint import memory_folder
from training.checkpoint.memory_folder import MemoryFolder

GOAL = 0.05  # share of the time between two checkpoints
RANKS = 2
LENGTH = 128
BUSY = 0.5  # load average of the last minute above which the machine counts as busy
READS = 3  # of each kind
READ = re.compile(r"^read in ([\d.]+) s: ([\d.]+) [GM]B from the nodes' memory, ([\d.]+) ", re.M)
SAVED = re.compile(r"^saved .*/step_(\d+)_ckp in ([\d.]+) s, for ([\d.]+) s", re.MULTILINE)


@dataclass(frozen=True)
class Save:
    """A checkpoint of a run: seconds until it was complete, and seconds that training waited."""

    step: int
    written: float
    stall: float


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--model", default="state-spaces/mamba-130m", metavar="NAME")
    parser.add_argument("--interval", type=int, default=10, metavar="STEPS")
    parser.add_argument("--saves", type=int, default=5)
    given = options.parse(parser)
    if given.small:
        given.model, given.interval, given.saves = "mamba-tiny", 4, 1
    if given.interval < 2 or given.saves < 1:
        parser.error("--interval must be at least 2, --saves at least 1")
    load = os.getloadavg()[0]
    result: dict[str, Any] = {
        "what": f"{given.model} on {RANKS} processes, a checkpoint every {given.interval} steps",
        "machine": {**machine(), "threads": THREADS, "load before": round(load, 2)},
        "goal": GOAL,
    }
    if load > BUSY:
        result["note"] = "the machine was busy with other work; to be repeated on a quiet one"
    for name, flag, in_memory in (
        ("background", True, False),
        ("background, in memory", True, True),
        ("waiting", False, False),
        ("waiting, in memory", False, True),
    ):
        result[name] = row = measure(
            *(given.model, given.interval, given.saves, 1 if given.small else READS),
            background=flag,
            in_memory=in_memory,
        )
        print(
            f"{name}: {row['bytes'] / 1e9:.2f} GB, training stands still for "
            f"{1000 * row['stall']:.0f} ms ({row['share']:.1%} of {given.interval} steps of "
            f"{row['step']:.2f} s), complete after {row['written']:.2f} s, "
            f"steps slower by {row['slower']:.2f} s in all",
            flush=True,
        )
        for place, seconds in row.get("read", {}).items():
            print(f"    read again from {place}: {min(seconds):.2f} s at best of {seconds}")
    backgrounds = ("background", "background, in memory")
    result["met"] = all(result[name]["share"] <= GOAL for name in backgrounds)
    return options.finish(given, "save", result, met=result["met"])


def measure(
    model: str, interval: int, saves: int, reads: int, *, background: bool, in_memory: bool
) -> dict[str, Any]:
    """Train once and sum up the run's report; with copies in memory, read the last one again."""
    last = interval * (saves + 1) - 1
    memory = MemoryFolder("bench", os.environ, memory_folder.places(os.environ), wanted=in_memory)
    with tempfile.TemporaryDirectory(prefix="sqshforge-bench-") as folder:
        flags = (
            f"--model_name={model}",
            "--dataset_path=synthetic:",
            f"--save_ckpt_path={folder}",
            f"--seq_length={LENGTH}",
            "--batch_size=1",
            f"--num_steps={last}",
            f"--checkpoint_interval={interval}",
            "--keep_checkpoints=1",
            "--report_interval=1",
            f"--async_checkpoint={background}",
        )
        try:
            memory.make()
            done = run(RANKS, *flags, f"--checkpoint_in_memory={in_memory}", timeout=3600)
            if done.returncode:
                sys.exit(done.stderr)
            read = reading(Path(folder), flags, reads) if in_memory and background else {}
        finally:
            memory.remove()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        found = manifest.newest(manifest.checkpoints(folder), print)
        assert found is not None, "a run that ends well has saved"
        size = sum(file.size for file in found[1].files.values())
    reports = [line for line in map(json.loads, lines) if line["kind"] == "report"]
    times = [LENGTH / line["tokens_per_second_per_device"] for line in reports]
    waits = [
        Save(int(step), float(written), float(stall))
        for step, written, stall in SAVED.findall(done.stdout)
        if int(step) != last
    ]
    return {"bytes": size, **summary(times, waits, interval), **({"read": read} if read else {})}


def reading(folder: Path, flags: Sequence[str], times: int) -> dict[str, list[float]]:
    """Restart the finished run `times` times for each place; returns the seconds of reading."""
    found: dict[str, list[float]] = {"memory": [], "page cache": [], "file system": []}
    for place, seconds in found.items():
        for _ in range(times):
            if place == "file system":
                for path in manifest.checkpoints(str(folder)).rglob("*"):
                    if path.is_file():
                        page_cache.forget(path)
            done = run(RANKS, *flags, f"--checkpoint_in_memory={place == 'memory'}", timeout=3600)
            match = READ.search(done.stdout)
            if done.returncode or match is None:
                sys.exit(done.stderr)
            if (float(match[2]) > 0) != (place == "memory"):
                sys.exit(f"{match[0]}: not from {place}")
            seconds.append(float(match[1]))
    return found


def summary(times: list[float], saves: list[Save], interval: int) -> dict[str, Any]:
    """Sum up a run from its saves and the seconds of its steps; the first is step 1.

    The time of a step includes the stall of the save before it.
    """
    during = {save.step: steps_during(times, save) for save in saves}
    disturbed = {step for steps in during.values() for step in steps}
    # The first step is slower: it allocates memory and chooses kernels.
    plain = [time for step, time in enumerate(times, 1) if step > 1 and step not in disturbed]
    step = statistics.median(plain)
    slower = [
        sum(times[one - 1] - step for one in during[save.step]) - save.stall for save in saves
    ]
    stall = statistics.median(save.stall for save in saves)
    return {
        "step": round(step, 3),
        "stall": round(stall, 3),
        "stalls": [save.stall for save in saves],
        "share": round(stall / (interval * step), 4),
        "share of one step": round(stall / step, 4),
        "written": round(statistics.median(save.written for save in saves), 3),
        "slower": round(statistics.median(slower), 3),
    }


def steps_during(times: list[float], save: Save) -> list[int]:
    """Return the steps during which a checkpoint was written: at least the one with the stall."""
    step, passed = save.step + 1, 0.0
    found = []
    while passed < save.written and step <= len(times):
        found.append(step)
        passed += times[step - 1]
        step += 1
    return found


if __name__ == "__main__":
    options.run(main)
