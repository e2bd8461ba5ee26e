"""Tokenize texts into a set on disk: `python -m training.data.tokenize --dataset=D --save_path=P`.

D is a folder or a pattern of .txt, .json, .jsonl, .csv or .parquet files, compressed or not (.gz,
.zst, .xz, .bz2), a set on disk, or a set on the hub. All texts, each ended by the tokenizer's
end-of-text token, are concatenated and cut into rows of seq_len tokens; only the rest at the very
end is dropped. P is a set of the library datasets with input_ids and labels, and appears once it is
complete. After a kill, the same command continues.
Exit codes: 0 done, 1 it failed (start it again to continue), 2 the request was wrong,
130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.cli import run_command
from training.config.flags import Flag, parse
from training.config.sections import DataConfig
from training.config.setting import boolean, integer, path
from training.data.how_to_read import TOKENIZER
from training.data.tokenize.texts import SAMPLES_BY, open_texts
from training.data.tokenize.tokenizer import Tokenizer, open_tokenizer
from training.data.tokenize.work import Job, run, was_placed
from training.errors import RequestError

PROGRAM = "python -m training.data.tokenize"


def _at_least_one(text: str) -> int:
    value = integer(text)
    if value < 1:
        raise ValueError("at least 1")
    return value


def _sample_by(text: str) -> str:
    if text not in SAMPLES_BY:
        raise ValueError(" or ".join(SAMPLES_BY))
    return text


SOURCE_FLAGS = (
    Flag(
        "dataset", str, None, "folder, pattern or URL of files, a set on disk, or a set on the hub"
    ),
    Flag(
        "dataset_config",
        str,
        None,
        "configuration of a folder or of a set on the hub, such as raw_en",
        ("dataset_config_name",),
    ),
    Flag("split", str, "train", "split to take"),
    Flag("text_column", str, "text", "column that holds the text"),
    Flag(
        "sample_by",
        _sample_by,
        "document",
        "in .txt files, a text is a whole document (the file), a paragraph or a line",
    ),
    Flag(
        "tokenizer",
        path,
        TOKENIZER,
        "a tokenizer.json or its folder, 'bytes', or a name on the hub",
    ),
    Flag(
        "append_eos",
        boolean,
        None,
        "end each text with the end-of-text token (default: if the tokenizer has one)",
    ),
    Flag(
        "num_proc",
        _at_least_one,
        None,
        "processes, of one thread each (default: one for each processor)",
    ),
    Flag("dryrun", boolean, False, "take 8192 texts only, shuffled with seed 42"),
)
"""Which texts are read and how they are tokenized, by training.data.pack too."""
FLAGS = (
    *SOURCE_FLAGS,
    Flag("seq_len", _at_least_one, DataConfig.seq_length, "tokens per row"),
    Flag("save_path", Path, None, "folder to make"),
)


def tokenize(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    make_set(parse(FLAGS, arguments, program=PROGRAM, about=str(__doc__)))


def make_set(given: dict[str, Any]) -> None:
    """Make the set that FLAGS ask for. Raises RequestError and TrainingError."""
    target = target_of(given)
    if was_placed(target):
        print(f"{target} is complete")
        return
    require_new(target)
    tokenizer = open_tokenizer(given["tokenizer"])
    if tokenizer.longest is not None and given["seq_len"] > tokenizer.longest:
        print(
            f"warning: --seq_len={given['seq_len']} is more than the {tokenizer.longest} that "
            f"{tokenizer.name} states as its longest; rows are made as requested",
            file=sys.stderr,
        )
    job = open_job(given, tokenizer, target, seq_len=given["seq_len"])
    made = run(job, processes_of(given))
    print(
        f"{target}: {made['rows']:,} rows of {job.seq_len:,} tokens of {job.tokenizer.name}, from "
        f"{made['documents']:,} texts; {made['dropped']:,} tokens at the end are dropped"
    )
    place = shlex.quote(str(target))
    print(f"to train with it: --dataset_path={place} --seq_length={job.seq_len}")


def target_of(given: dict[str, Any]) -> Path:
    """Return where to write. Raises RequestError for required flags that are missing."""
    absent = [name for name in ("dataset", "save_path") if given[name] is None]
    if absent:
        raise RequestError.of([f"--{name}: must be given" for name in absent])
    target: Path = given["save_path"].absolute()
    return target


def require_new(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise RequestError(f"--save_path: {target} already exists; fix: remove it, or name another")


def processes_of(given: dict[str, Any]) -> int:
    return int(given["num_proc"] or len(os.sched_getaffinity(0)))


def open_job(
    given: dict[str, Any], tokenizer: Tokenizer, target: Path, *, seq_len: int = 0, layout: str = ""
) -> Job:
    """Make a job of the texts that SOURCE_FLAGS ask for. Raises RequestError."""
    # One thread per process: there are many parts, and threads within them would get in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _quiet()
    append_eos = given["append_eos"]
    if append_eos is None:
        append_eos = tokenizer.eos is not None
        for warning in tokenizer.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    elif append_eos and tokenizer.eos is None:
        raise RequestError(f"--append_eos: {tokenizer.name} states no end-of-text token")
    texts = open_texts(
        given["dataset"],
        config=given["dataset_config"],
        split=given["split"],
        column=given["text_column"],
        sample_by=given["sample_by"],
        dryrun=given["dryrun"],
    )
    return Job(texts, tokenizer, append_eos, seq_len, target, layout)


def _quiet() -> None:
    """Keep libraries from printing, except progress in reading texts, which may take long."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else it reports every retry
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main(work: Callable[[Sequence[str]], None] = tokenize) -> int:
    """Do what the command line asks for; return the exit code."""
    return run_command(work, sys.argv[1:], "stopped; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
