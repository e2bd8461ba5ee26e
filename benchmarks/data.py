"""Measure how fast one process reads samples from memory, and how much it reads from disk for them.

usage: python -m benchmarks.data [--rounds 5] [--tokens 32000000] [--small] [--output DIR]

Writes synthetic documents to a temporary folder and reads every window of 4,096 tokens once per
round: from packed files, both plain and weighted by position, and from a mixture of two. The goal
applies to each of these; JSON lines and synthetic tokens are measured for comparison. Then a packed
file that is not in the page cache is read through memory maps, some windows in random order and all
windows in order, with and without advising the kernel that access is random: bytes read from the
disk (/proc/self/io) and seconds. The temporary folder must be on a disk. Writes everything to
benchmarks/results/data.json and exits 1 if the goal is missed. Use an otherwise idle machine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import options
from training.data.base import Samples
from training.data.files import Maps
from training.data.layout import WORD
from training.data.lines import Lines
from training.data.mixture import Mixture, Source
from training.data.packed import Packed, PackedWriter
from training.data.sources import Synthetic

LENGTH = 4096
GOAL = 50e6  # tokens/s
VOCABULARY = 65_024
LINES = 2_000
DRAWN = 400
"""Number of windows that are read in random order."""


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32_000_000)
    given = options.parse(parser)
    if given.small:
        given.rounds, given.tokens = 1, 8 * (LENGTH + 1)
    if given.rounds < 1 or given.tokens < 4 * (LENGTH + 1):
        parser.error(f"--rounds must be at least 1, --tokens at least {4 * (LENGTH + 1)}")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="sqshforge-bench-") as folder:
        for name, samples, goal in sources(Path(folder), given.tokens):
            rows.append(measure(name, samples, given.rounds, goal))
            print(
                f"{name}: {rows[-1]['median'] / 1e6:.0f} million tokens/s (median of "
                f"{given.rounds})" + (f", goal {goal / 1e6:.0f} million" if goal else ""),
                flush=True,
            )
        packed = Path(folder) / "disk.npy"
        write_packed(packed, 2 * given.tokens)
        reads = [from_disk(packed, **how) for how in WAYS]
    for read in reads:
        print(
            f"{read['windows']:,} windows {read['order']}, advice {read['advice']}: "
            f"{read['asked_bytes'] / 1e6:.1f} MB asked for, {read['read_bytes'] / 1e6:.1f} MB "
            f"read in {read['seconds']:.2f} s",
            flush=True,
        )
    met = all(row.get("met", True) for row in rows)
    result = {
        "what": f"tokens/s of one process, samples of {LENGTH}, files in the page cache",
        "rows": rows,
        "from_disk": reads,
        "met": met,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
    return options.finish(given, "data", result, met=met)


def sources(folder: Path, tokens: int) -> list[tuple[str, Samples, float | None]]:
    """Write the data and open it in each way: name, samples, and the goal if there is one."""
    for name, share in (("a", 3), ("b", 1)):
        write_packed(folder / f"{name}.npy", tokens * share // 4)
    first, second = (
        Packed(str(folder / f"{name}.npy"), LENGTH, vocab_size=VOCABULARY) for name in "ab"
    )
    mixture = Mixture(
        [
            Source(name="a", samples=first, weight=0.75),
            Source(name="b", samples=second, weight=0.25),
        ],
        seed=0,
    )
    files = str(folder / "*.npy")
    weighted = Packed(files, LENGTH, vocab_size=VOCABULARY, position_weighting=True)
    write_lines(folder / "lines" / "a.json")
    return [
        ("packed", Packed(files, LENGTH, vocab_size=VOCABULARY), GOAL),
        ("packed, weighted", weighted, GOAL),
        ("mixture of packed", mixture, GOAL),
        ("JSON lines, converted", Lines(folder / "lines", LENGTH, seed=0), None),
        ("synthetic", Synthetic(LENGTH, VOCABULARY, count=500), None),
    ]


def write_packed(path: Path, tokens: int) -> None:
    """Write documents with exponentially distributed lengths, about 1,500 tokens on average."""
    source = np.random.default_rng(0)
    with PackedWriter(path) as file:
        while file.tokens < tokens:
            length = int(source.exponential(1500)) % 16_000 + 1
            file.write(source.integers(0, VOCABULARY, length))


def write_lines(path: Path) -> None:
    path.parent.mkdir()
    source = np.random.default_rng(0)
    with path.open("w") as file:
        for length in source.integers(LENGTH // 2, 2 * LENGTH, LINES).tolist():
            ids = source.integers(0, VOCABULARY, length).tolist()
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * length}) + "\n")


WAYS: list[dict[str, bool]] = [
    {"shuffled": shuffled, "random": random}
    for shuffled in (True, False)
    for random in (False, True)
]


def from_disk(path: Path, *, shuffled: bool, random: bool) -> dict[str, Any]:
    """Read windows of a packed file that is not in memory: DRAWN in random order, or all in order.

    random: whether the map is opened for random access.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size, window = path.stat().st_size, (LENGTH + 1) * WORD.itemsize
    numbers = np.arange(size // window)  # (windows,)
    if shuffled:
        numbers = np.random.default_rng(0).permutation(numbers)[:DRAWN]  # (up to DRAWN,)
    maps = Maps(random=random)
    before, since = _bytes_read(), time.perf_counter()
    for number in numbers.tolist():
        maps.read(str(path), WORD, number * window, LENGTH + 1, size).sum()
    return {
        "order": "in random order" if shuffled else "in order",
        "advice": "random" if random else "none",
        "windows": len(numbers),
        "asked_bytes": len(numbers) * window,
        "read_bytes": _bytes_read() - before,
        "seconds": round(time.perf_counter() - since, 3),
    }


def _bytes_read() -> int:
    """Return the bytes that this process has made the kernel read from disks (proc(5))."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"])


def measure(name: str, samples: Samples, rounds: int, goal: float | None) -> dict[str, Any]:
    """Read all samples `rounds` times, after an uncounted round to warm up."""
    speeds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for index in range(len(samples)):
            samples[index]
        speeds.append(len(samples) * LENGTH / (time.perf_counter() - started))
    median = statistics.median(speeds[1:])
    row: dict[str, Any] = {"name": name, "tokens_per_second": [round(one) for one in speeds[1:]]}
    row["median"] = round(median)
    if goal:
        row |= {"goal": round(goal), "met": median >= goal}
    return row


if __name__ == "__main__":
    options.run(main)
