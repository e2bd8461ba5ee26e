r"""Pack texts into a file of tokens: `python -m training.data.pack --dataset=D --save_path=P`.

The file is for training.mamba_composer, and as packed:P for every entry point. Texts are read and
tokenized as in training.data.tokenize. Each text is a document: all its tokens, ended by the
tokenizer's end-of-text token, are targets, and its positions start at 0. A text that is longer than
the layout has positions is cut, and continues as another document. P, and P.size with the number of
tokens, appear once they are complete. After a kill, the same command continues.

    python3 -m training.data.pack --dataset=/data/mine --split=train \
        --tokenizer=/models/tokenizer.json --save_path=/data/mine.npy
    python3 -m training.data.pack --dataset=/data/mine --split=validation \
        --tokenizer=/models/tokenizer.json --save_path=/data/mine.validation.npy
    python3 -m training.create_mamba_config --text_paths=/data/mine.npy \
        --eval_paths=/data/mine.validation.npy

Exit codes: 0 done, 1 it failed (start it again to continue), 2 the request was wrong,
130 interrupted.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training.config.flags import Flag, parse
from training.data.layout import LAYOUTS, SIZE, WORD, Layout, begins_in
from training.data.tokenize.__main__ import (
    SOURCE_FLAGS,
    main,
    open_job,
    processes_of,
    require_new,
    target_of,
)
from training.data.tokenize.blocks import whole
from training.data.tokenize.tokenizer import Tokenizer, open_tokenizer
from training.data.tokenize.work import SET, Job, encode, held, place, was_placed
from training.errors import RequestError

PROGRAM = "python -m training.data.pack"
DEFAULT_LAYOUT = "16/14"


def _layout(text: str) -> str:
    if text not in LAYOUTS:
        raise ValueError(" or ".join(LAYOUTS))
    return text


FLAGS = (
    *SOURCE_FLAGS,
    Flag(
        "layout",
        _layout,
        DEFAULT_LAYOUT,
        "bits of a word for ids and for positions: 16/14, or 17/13 for up to 131,072 ids",
    ),
    Flag("save_path", Path, None, "file to write"),
)


def pack(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    given = parse(FLAGS, arguments, program=PROGRAM, about=str(__doc__))
    target, name = target_of(given), given["layout"]
    if was_placed(target):
        _write_size(target)
        print(f"{target} is complete")
        return
    require_new(target)
    tokenizer = open_tokenizer(given["tokenizer"])
    _require_room(tokenizer, name)
    job = open_job(given, tokenizer, target, layout=name)
    tokens, documents = _make(job, processes_of(given))
    texts = int((job.texts.sizes > 0).sum())
    cut = f", cut into {documents:,} documents, as some are long" if documents > texts else ""
    print(f"{target}: {tokens:,} tokens of {tokenizer.name}, from {texts:,} texts{cut}")
    kind = "packed" if name == DEFAULT_LAYOUT else f"packed-{name}"
    print(f"to train with it: --dataset_path={shlex.quote(f'{kind}:{target}')}")
    if name == DEFAULT_LAYOUT:
        print(
            "or, with Composer: python3 -m training.create_mamba_config "
            f"--text_paths={shlex.quote(str(target))} --vocab_size={tokenizer.vocab_size}"
        )


def _require_room(tokenizer: Tokenizer, name: str) -> None:
    size = tokenizer.vocab_size
    if size <= LAYOUTS[name].vocabulary:
        return
    larger = [other for other, layout in LAYOUTS.items() if size <= layout.vocabulary]
    raise RequestError(
        f"--layout: {name} has room for {LAYOUTS[name].vocabulary:,} ids, and {tokenizer.name} has "
        f"{size:,}"
        + (f"; fix: take {larger[0]}" if larger else ", too many for any; fix: make a set on disk")
    )


def _make(job: Job, processes: int) -> tuple[int, int]:
    """Write the file, and return its numbers of tokens and documents."""
    layout = LAYOUTS[job.layout]
    with held(job):
        encode(job, processes)
        documents = 0
        with whole(job.folder / SET) as file:
            for part in job.line().paths:
                documents += _documents(part, layout)
                with part.open("rb") as words:
                    shutil.copyfileobj(words, file)
        place(job)
        tokens = _write_size(job.target)
    return tokens, documents


def _documents(part: Path, layout: Layout) -> int:
    return begins_in(np.memmap(part, WORD, "r"), layout) if part.stat().st_size else 0


def _write_size(target: Path) -> int:
    tokens = target.stat().st_size // WORD.itemsize
    with whole(target.with_name(target.name + SIZE)) as file:
        file.write(f"{tokens}\n".encode())
    return tokens


if __name__ == "__main__":
    sys.exit(main(pack))
