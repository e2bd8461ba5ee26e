"""Measure how fast texts are tokenized, against the library tokenizers' encode_batch on them.

usage: python -m benchmarks.tokenize [--rounds 5] [--megabytes 8] [--output DIR]

The text is Python's standard library; the tokenizer, a byte-level BPE of 8000 tokens, is trained on
a part of it. Both sides have one thread and the text in memory-mapped files: encode_batch gets the
texts and its encodings are discarded; ours is a whole run, from open texts to a finished data set.
They alternate, and the ratio is that of the medians. Then it measures how fast training reads
samples from the set, in millions of tokens a second.

Writes tokenize.json to benchmarks/results/ and exits 1 if a goal is missed. Use an otherwise idle
machine.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from benchmarks import options
from training.data.arrow import Arrow
from training.data.tokenize.texts import Texts, open_texts
from training.data.tokenize.tokenizer import open_tokenizer
from training.data.tokenize.work import Job, run

GOAL = 0.9  # x the speed of encode_batch
READ_GOAL = 5.0  # millions of tokens a second
SEQ_LEN = 1024
TOGETHER = 1000
"""Texts per call of encode_batch, as many as datasets passes to a mapped function."""


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=8, help="text to tokenize")
    given = options.parse(parser)
    if given.small:
        given.rounds = given.megabytes = 1
    if min(given.rounds, given.megabytes) < 1:
        parser.error("--rounds and --megabytes must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), given.rounds, given.megabytes)
    print(
        f"{result['tokens']:,} tokens: encode_batch {result['library']:.2f} s, the whole "
        f"{result['whole']:.2f} s: {result['ratio']:.2f} x its speed (goal: {GOAL}); read at "
        f"{result['read']:.0f} M tokens/s (goal: {READ_GOAL:g})"
    )
    return options.finish(given, "tokenize", result, met=result["met"])


def measure(folder: Path, rounds: int, megabytes: int) -> dict[str, Any]:
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    texts = write_texts(folder, megabytes * 2**20)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    target = folder / "set"

    def alone() -> None:
        for first in range(0, len(texts), TOGETHER):
            library.encode_batch(texts.read(first, first + TOGETHER), add_special_tokens=False)

    def whole() -> None:
        for path in target.glob("*"):
            path.unlink()
        if target.exists():
            target.rmdir()
        tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
        run(Job(texts, tokenizer, True, SEQ_LEN, target), processes=1)

    times = [(timed(alone), timed(whole)) for _ in range(rounds + 1)][1:]  # the first warms up
    least, most = (statistics.median(column) for column in zip(*times, strict=True))
    samples = Arrow(str(target), SEQ_LEN)

    def read() -> None:
        for index in range(len(samples)):
            samples[index]

    tokens = len(samples) * SEQ_LEN
    speed = tokens / 1e6 / statistics.median(timed(read) for _ in range(rounds))
    return {
        "machine": {
            "processor": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "datasets": datasets.__version__,
        },
        "text": int(texts.sizes.sum()),
        "tokens": tokens,
        "library": round(least, 3),
        "whole": round(most, 3),
        "rounds": [[round(one, 3) for one in pair] for pair in times],
        "ratio": round(least / most, 3),
        "read": round(speed, 1),
        "met": least / most >= GOAL and speed >= READ_GOAL,
    }


def write_texts(folder: Path, size: int) -> Texts:
    """Write about `size` characters as a parquet file, with a tokenizer for them; open the text."""
    found: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("**/*.py")):
        text = path.read_text(errors="replace")
        found.append(text)
        size -= len(text)
        if size < 0:
            break
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(found[:200], trainer)
    made.save(str(folder / "tokenizer.json"))
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": found}).to_parquet(str(folder / "texts.parquet"))
    return open_texts(str(folder / "texts.parquet"))


def timed(work: Callable[[], object]) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


if __name__ == "__main__":
    options.run(main)
