"""Measure how long steps wait for their data: FSDP on two processes, with three kinds of sources.

usage: python -m benchmarks.wait [--steps 40] [--small] [--output DIR]

Trains mamba-tiny on sequences of 512 from packed files, from a set on disk and from a stream of
JSON lines that is tokenized as it is read, each with the default read-ahead (a thread, two batches)
and with none (prefetch=0). The share of the time that steps waited is `data_wait` of metrics.jsonl,
of the rank that waited longest; the first ten steps, which open everything, do not count. Writes
wait.json to benchmarks/results/ and exits 1 if reading ahead misses the goal. Use an otherwise idle
machine: contention from other programs shows up as waiting too.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from benchmarks import options
from tests.training.support.runs import run
from training.data.packed import PackedWriter

LENGTH = 512
SHORT = 64  # tokens of a sequence in a small run
GOAL = 0.01
UNCOUNTED = 10
DOCUMENTS = 20_000


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    given = options.parse(parser)
    length, documents = LENGTH, DOCUMENTS
    if given.small:
        given.steps, length, documents = 2 * UNCOUNTED, SHORT, 1000
    if given.steps <= UNCOUNTED:
        parser.error(f"--steps must be more than {UNCOUNTED}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sqshforge-bench-") as name:
        folder = Path(name)
        for source, flags in sources(folder, documents, length):
            for prefetch in (2,) if given.small else (2, 0):
                save = folder / f"run{len(rows)}"
                shares = measure(save, given.steps, length, *flags, f"--prefetch={prefetch}")
                rows.append({"source": source, "prefetch": prefetch, "data_wait": shares})
                print(f"{source}, prefetch {prefetch}: waits of {max(shares):.2%}", flush=True)
    met = all(max(row["data_wait"]) <= GOAL for row in rows if row["prefetch"])
    result = {
        "what": "share of the time that steps waited for data, FSDP on 2 processes, mamba-tiny, "
        f"2 sequences of {length} each; one figure for every {UNCOUNTED} steps",
        "how": "python -m benchmarks.wait",
        "goal": GOAL,
        "met": met,
        "rows": rows,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "load": f"{os.getloadavg()[1]:.1f} processes on average while it ran",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return options.finish(given, "wait", result, met=met)


def sources(folder: Path, documents: int, length: int) -> list[tuple[str, tuple[str, ...]]]:
    """Write the same documents in each format; returns the name and the flags of each source."""
    chance = np.random.default_rng(0)
    texts = [
        chance.integers(97, 123, size, dtype=np.uint8).tobytes().decode()
        for size in chance.integers(100, 4000, documents).tolist()
    ]
    with PackedWriter(folder / "packed.npy") as packed:
        for text in texts:
            packed.write(np.frombuffer(text.encode(), np.uint8))
    line = np.frombuffer("".join(texts).encode(), np.uint8).astype(np.int32)  # (all tokens,)
    blocks = line[: len(line) // length * length].reshape(-1, length)  # (rows, l)
    datasets.Dataset.from_dict({"input_ids": blocks.tolist()}).save_to_disk(str(folder / "set"))
    (folder / "texts").mkdir()
    for file in range(4):
        lines = (json.dumps({"text": text}) for text in texts[file::4])
        (folder / "texts" / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        ("packed", (f"--dataset_path=packed:{folder}/packed.npy",)),
        ("set on disk", (f"--dataset_path={folder}/set",)),
        ("stream", (f"--dataset_path=stream:{folder}/texts", "--tokenizer=bytes")),
    ]


def measure(save: Path, steps: int, length: int, *flags: str) -> list[float]:
    """Train; returns the share of time waited in each report interval except the first."""
    done = run(
        2,
        "--model_name=mamba-tiny",
        f"--seq_length={length}",
        f"--save_ckpt_path={save}",
        f"--num_steps={steps}",
        f"--report_interval={UNCOUNTED}",
        *flags,
        timeout=1200,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()
    ]
    return [round(line["data_wait"], 5) for line in lines if line["kind"] == "report"][1:]


if __name__ == "__main__":
    options.run(main)
