"""A Hugging Face set on disk (`save_to_disk`), as training.data.tokenize and others write it.

Its rows are `input_ids` of one length and optionally `labels`. A row is one sample, or several if
its length is a multiple of seq_length: the samples are then those of a set made with that
seq_length. The files are mapped into memory, so only what is asked for is read.

A set made by training.data.tokenize states where its documents end. In other sets, and in older
ones of training.data.tokenize, a token shows it: one that is asked for, or that the set states.

Shapes: l seq_length, n tokens of a part of the column (all its rows concatenated).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.data.base import Sample, begun, numbered
from training.data.files import ArrowFiles
from training.data.how_to_read import how_to_read, how_to_read_texts
from training.data.libraries import datasets_library
from training.data.splits import TEXT
from training.data.tokenize.blocks import DOCUMENTS, END, IDS, LABELS, METADATA
from training.data.tokenize.tokenizer import Ends
from training.errors import RequestError
from training.ops.loss import IGNORED

MASK = "attention_mask"

Parts = list[np.ndarray[Any, np.dtype[Any]]]


class Arrow:
    """The rows of a set on disk, as samples (see training.data.base).

    A token's target is the label of the next one, as in models that shift labels themselves; the
    last position of a sample has none. document_end: the token that ends a document, -1 for what
    the set itself states. Raises RequestError if the set is missing or incomplete, its rows are not
    of one length, or that length is not a multiple of seq_length.
    """

    def __init__(
        self, path: str, seq_length: int, split: str = "train", document_end: int = -1
    ) -> None:
        self.seq_length = seq_length
        folder, dataset, fingerprint = _opened(path, split, seq_length)
        length = self._row = _row_length(path, dataset.data.column(IDS))
        if length % seq_length:
            raise RequestError(
                f"{path} has rows of {length:,} tokens, which cannot be cut into "
                f"pieces of seq_length {seq_length:,}; fix: use {length:,} or a divisor of it"
            )
        ids = _flat(path, IDS, dataset.data.column(IDS))
        has_labels = LABELS in dataset.column_names
        if has_labels and _row_length(path, dataset.data.column(LABELS)) != length:
            raise RequestError(f"{path} has labels that are not as long as its rows")
        labels = _flat(path, LABELS, dataset.data.column(LABELS)) if has_labels else ids
        self._labels = LABELS if has_labels else IDS
        self._path, self._folder, self._files = path, folder, _files(folder, len(dataset))
        about = _stated(folder)
        stated, eos = about.get("vocab_size"), about.get("eos")
        self._document_end = document_end if document_end >= 0 or eos is None else eos
        self._documents = None if document_end >= 0 else _ends(folder)
        self._has_ends = self._documents is not None
        self.knows_documents = self._has_ends or self._document_end >= 0
        if has_labels and not stated:
            _require_labels(path, labels, length)
        elif not has_labels and MASK in dataset.column_names:
            _require_no_padding(path, dataset.data.column(MASK), length)
        self.vocab_size = stated or _largest(path, ids, labels) + 1
        self._described = (
            f"{len(dataset):,} rows of {length:,} tokens"
            + (" and labels" if has_labels else "")
            + ("" if stated else f" (largest id {self.vocab_size - 1:,}, found by reading all)")
        )
        facts = f"arrow {seq_length} {length} {len(dataset)} {fingerprint}"
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_documents": None}

    def __len__(self) -> int:
        return len(self._files) * (self._row // self.seq_length)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs = self._read(IDS, index)  # (l,)
        labels = inputs if self._labels == IDS else self._read(self._labels, index)  # (l,)
        targets = torch.full_like(labels, IGNORED)  # (l,)
        targets[:-1] = labels[1:]
        return Sample(inputs, targets, None, self._numbers(index, inputs))

    def _numbers(self, index: int, inputs: Tensor) -> Tensor | None:
        """Number the documents of a sample's inputs (l,), (l,) int32; None if they are unknown."""
        if self._has_ends and self._documents is None:
            self._documents = _ends(self._folder)
        if self._documents is not None:
            return begun(self._documents, index * self.seq_length, self.seq_length)  # (l,)
        if self._document_end < 0:
            return None
        ends = inputs.numpy()[:-1] == self._document_end  # (l - 1,)
        return numbered(np.concatenate(([False], ends)))  # (l,)

    def described(self) -> str:
        return self._described

    def is_here(self) -> bool:
        return Path(self._files.paths[0]).is_file()

    def _read(self, column: str, index: int) -> Tensor:
        """Read a sample of one column, (l,)."""
        row, piece = divmod(index * self.seq_length, self._row)
        number = bisect_right(self._files.ends, row)
        row -= self._files.ends[number - 1] if number else 0
        found = self._files.table(number).column(column).slice(row, 1)
        (ids,) = _flat(self._path, column, found)  # (n,), n the tokens of a row
        return torch.from_numpy(ids[piece : piece + self.seq_length].astype(np.int64))  # (l,)


def row_length(path: str, split: str = "train") -> int:
    """Return the tokens per row of a set. Raises RequestError as Arrow does."""
    _, dataset, _ = _opened(path, split)
    return _row_length(path, dataset.data.column(IDS))


def _opened(path: str, split: str, seq_length: int = 0) -> tuple[Path, Any, str]:
    """Open a set; return the folder of its files, the set, and its fingerprint."""
    folder = split_folder(path, split, seq_length)
    files, fingerprint = _state(folder)
    if not files:
        raise RequestError(f"{path} has no rows")
    dataset = _load(folder)
    if IDS not in dataset.column_names:
        raise RequestError(
            f"{path} has no column {IDS!r}; there are: "
            f"{', '.join(dataset.column_names) or 'none'}"
            + (
                f"; fix: {how_to_read_texts(path, seq_length)}"
                if TEXT in dataset.column_names
                else ""
            )
        )
    if not len(dataset):
        raise RequestError(f"{path} has no rows")
    return folder, dataset, fingerprint


def split_folder(given: str, split: str, seq_length: int = 0) -> Path:
    """Find the folder of a split's files, which is the set's own if it has no splits.

    seq_length: what the error suggests for making a set if there are texts instead. Raises
    RequestError if the folder or the split is missing, or if it is not a set on disk.
    """
    path = Path(given)
    if not path.is_dir():
        raise RequestError(f"{path} does not exist, or is not a folder")
    folder = path
    if (path / "dataset_dict.json").is_file():
        folder = path / split
        if not folder.is_dir():
            there = sorted(one.name for one in path.iterdir() if one.is_dir())
            raise RequestError(f"{path} has no split {split!r}; there are: {', '.join(there)}")
    for name in ("state.json", "dataset_info.json"):
        if not (folder / name).is_file():
            raise RequestError(
                how_to_read(given, seq_length)
                or f"{folder} is not a complete set on disk: it has no {name}; fix: make one "
                f"with python -m training.data.tokenize"
            )
    if folder == path and split not in ("train", "validation"):
        raise RequestError(f"{path} has no splits, so no split {split!r}")
    return folder


def _state(folder: Path) -> tuple[list[str], str]:
    """Read the names of the files and the set's own fingerprint.

    The fingerprint that the library gives an open set depends on the library's release.
    """
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        return [file["filename"] for file in state["_data_files"]], str(state["_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is broken or half-written: {error!r}") from error


def _files(folder: Path, rows: int) -> ArrowFiles:
    names, _ = _state(folder)
    try:
        files = ArrowFiles([folder / name for name in names])
    except Exception as error:  # pyarrow has errors of its own
        raise RequestError(f"{folder} is broken: {' '.join(str(error).split())}") from error
    if len(files) != rows:
        raise RequestError(f"{folder}: its files have {len(files):,} rows, but the set {rows:,}")
    return files


def _load(folder: Path) -> Any:
    datasets = datasets_library(f"{folder} is read")
    try:
        return datasets.load_from_disk(str(folder), keep_in_memory=False)
    except Exception as error:  # arrow, json and datasets have errors of their own
        reason = " ".join(str(error).split())
        raise RequestError(f"{folder} is broken or half-written: {reason}") from error


def _row_length(path: str, column: Any) -> int:
    """Return the length that all rows have, looking only at where rows begin."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ) or not pa.types.is_integer(kind.value_type):
        raise RequestError(f"{path} has rows of {kind}, not lists of whole numbers")
    found = pc.min_max(pc.list_value_length(column)).as_py()
    if column.null_count or not found["min"]:
        raise RequestError(f"{path} has rows without tokens")
    if found["min"] != found["max"]:
        raise RequestError(
            f"{path} has rows of {found['min']:,} to {found['max']:,} tokens; fix: make all rows "
            f"of one length"
        )
    return int(found["min"])


def _flat(path: str, name: str, column: Any) -> Parts:
    """View a column as its concatenated tokens, (n,) per part; nothing is copied or read."""
    chunks = [chunk.flatten() for chunk in column.chunks]
    if any(chunk.null_count for chunk in chunks):
        raise RequestError(f"{path} has missing values in {name}")
    return [chunk.to_numpy(zero_copy_only=True) for chunk in chunks]


def _ends(folder: Path) -> Ends | None:
    """Map where the documents end, (documents,); None if the set does not state it."""
    path = folder / DOCUMENTS
    if not path.is_file():
        return None
    try:
        return np.memmap(path, END, "r") if path.stat().st_size else np.zeros(0, END)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _stated(folder: Path) -> dict[str, Any]:
    """Read the size of the vocabulary and the end of text, if the set itself states them."""
    path = folder / METADATA
    if not path.is_file():
        return {}
    try:
        about = json.loads(path.read_text())
        return {"vocab_size": int(about["vocab_size"]), "eos": about.get("eos")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} cannot be read: {error!r}") from error


def _require_labels(path: str, labels: Parts, row: int) -> None:
    """Refuse only IGNORED, and a label below 0 that is not, which would count as token 0."""
    before = 0
    if all((part == IGNORED).all() for part in labels):
        raise RequestError(
            f"{path} has only {IGNORED} in {LABELS}, so no target would count; fix: write the ids "
            "of the targets there"
        )
    for part in labels:
        if len(part) and int(part.min()) < 0:
            wrong = (part < 0) & (part != IGNORED)
            if wrong.any():
                at = int(wrong.argmax())
                raise RequestError(
                    f"{path} has the label {part[at]} in row {(before + at) // row:,}; fix: write "
                    f"{IGNORED} where a token is not a target, else its id"
                )
        before += len(part)


def _require_no_padding(path: str, mask: Any, row: int) -> None:
    """Refuse padding if no labels exclude it from the targets: it would be trained on."""
    import pyarrow as pa

    kind = getattr(mask.type, "value_type", pa.null())
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return  # whatever it is, it is not a mask of tokens
    before = 0
    for chunk in mask.chunks:
        shown = np.asarray(chunk.flatten())  # (n,)
        if not shown.all():
            at = before + int(np.argmin(shown.astype(bool)))
            raise RequestError(
                f"{path} has padding ({MASK} 0) in row {at // row:,}, and no {LABELS}, so padding "
                f"would be trained on; fix: write {LABELS}, the {IDS} with {IGNORED} where {MASK} "
                "is 0"
            )
        before += len(shown)


def _largest(path: str, ids: Parts, labels: Parts) -> int:
    if min(int(part.min()) for part in ids if len(part)) < 0:
        raise RequestError(f"{path} has token ids below 0")
    return max(int(part.max()) for part in (*ids, *labels) if len(part))
