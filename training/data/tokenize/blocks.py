"""The set on disk: files of rows that the library datasets can read (`load_from_disk`)."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from training.data.tokenize.tokenizer import Ids
from training.errors import writing

IDS, LABELS = "input_ids", "labels"
METADATA = "sqshforge.json"
"""Written by training.data.tokenize beside the rows; states the size of the vocabulary."""
DOCUMENTS, END = "documents.ends", np.dtype("<i8")
"""Beside the rows: where each document ends, counted in tokens over all rows, ascending."""

FILE_TOKENS, BATCH_TOKENS = 2**26, 2**20
"""Tokens per file (512 MiB with the labels) and per record batch in it."""
WIDTH = 4
"""Bytes per token in a file of tokens: int32."""
# The older name of a list type: releases of datasets before 4 and from 4 on both read it.
LIST = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}
FEATURES = {IDS: LIST, LABELS: LIST}


HALF = ".half"
"""Suffix of a file that is being written, or that a killed process left."""


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears completely or not at all. Raises TrainingError."""
    half = path.with_name(f"{path.name}.{os.getpid()}{HALF}")
    with writing(path):
        try:
            with half.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


class Line:
    """The concatenated tokens of all shards, read from their files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.counts = [path.stat().st_size // WIDTH for path in self.paths]
        self._ends = list(accumulate(self.counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, begin: int, count: int) -> Ids:
        """Read tokens begin ... begin + count - 1: (count,)."""
        pieces = []
        index = bisect_right(self._ends, begin)
        while count:
            at = begin - (self._ends[index] - self.counts[index])
            take = min(count, self.counts[index] - at)
            pieces.append(np.fromfile(self.paths[index], "<i4", take, offset=at * WIDTH))  # (take,)
            begin, count, index = begin + take, count - take, index + 1
        return np.concatenate(pieces)  # (count,)


def file_names(tokens: int, seq_len: int) -> list[str]:
    """Return the names of the files that hold the blocks of that many tokens."""
    count = -(-(tokens // seq_len) // rows_of_a_file(seq_len))
    return [f"data-{number:05}-of-{count:05}.arrow" for number in range(count)]


def rows_of_a_file(seq_len: int) -> int:
    return max(1, FILE_TOKENS // seq_len)


def write_rows(line: Line, path: Path, number: int, seq_len: int) -> int:
    """Write the blocks of one file, with the ids as labels; return the number of tokens."""
    import pyarrow as pa

    first = number * rows_of_a_file(seq_len)
    end = min(first + rows_of_a_file(seq_len), len(line) // seq_len)
    at_once = max(1, BATCH_TOKENS // seq_len)
    numbers = pa.list_(pa.int32())
    about = json.dumps({"info": {"features": FEATURES}})
    schema = pa.schema(dict.fromkeys(FEATURES, numbers), metadata={"huggingface": about})
    with whole(path) as file, pa.ipc.new_stream(file, schema) as stream:
        for row in range(first, end, at_once):
            rows = min(at_once, end - row)
            ids = line.read(row * seq_len, rows * seq_len)  # (rows * l,)
            ends = np.arange(rows + 1, dtype=np.int32) * seq_len  # (rows + 1,)
            blocks = pa.ListArray.from_arrays(pa.array(ends), pa.array(ids))
            stream.write_batch(pa.record_batch([blocks, blocks], schema=schema))
    return (end - first) * seq_len


def write_documents(folder: Path, line: Line, ends: Sequence[Path]) -> None:
    """Write DOCUMENTS from `ends`, the files of where each shard's documents end."""
    before = 0
    with whole(folder / DOCUMENTS) as file:
        for path, count in zip(ends, line.counts, strict=True):
            file.write((np.fromfile(path, END) + before).astype(END, copy=False).data)
            before += count


def describe(folder: Path, line: Line, seq_len: int, request: str, about: dict[str, Any]) -> None:
    """Write what makes the files a set, METADATA last. request: what the set was made of."""
    names = file_names(len(line), seq_len)
    fingerprint = hashlib.blake2b(f"{request} {line.counts}".encode(), digest_size=8).hexdigest()
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
    rows = len(line) // seq_len
    about = {**about, "seq_len": seq_len, "rows": rows, "tokens": rows * seq_len}
    for name, content in (("dataset_info.json", info), ("state.json", state), (METADATA, about)):
        with whole(folder / name) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")
