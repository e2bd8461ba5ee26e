"""Packed tokens: headerless files of 32-bit words, each a token, its position and its loss bit.

The words are those of training.data.layout. PATH.size, if it exists, has the number of tokens as
text. A token whose position is 0 or below the one before begins a document.

Shapes: l sequence length.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from glob import glob
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from training.data.base import Sample, numbered
from training.data.files import LARGE, Maps
from training.data.layout import LAYOUTS, LOSS_BIT, SIZE, WORD, Layout, words_of
from training.errors import RequestError, writing
from training.ops.loss import IGNORED

PROBE = 1 << 16
"""Words at the beginning of each file that are checked before training."""


class Packed:
    """The windows of packed files, as samples (see training.data.base).

    `paths` is a file name, a pattern, or several of them; the files are read in sorted order. Each
    is cut into windows of l + 1 tokens that neither overlap nor continue in the next file; the rest
    at a file's end is not read. A target does not count (-100, weight 0) if it begins a document or
    its loss bit is not set. With `position_weighting`, the others weigh tanh(position / 10), with
    positions counted from the beginning of the window or of the document, whichever is nearer.
    shuffled: the windows are read in random order.

    Raises RequestError for a file that is missing, empty, not a whole number of words or not of the
    length in its PATH.size, if no loss bit is found, and for an id that is not below `vocab_size`
    (by default all that the layout can hold). The first PROBE words of each file are checked at
    once, the others on reading.
    """

    knows_documents = True

    def __init__(
        self,
        paths: str | Sequence[str],
        seq_length: int,
        *,
        layout: Layout = LAYOUTS["16/14"],
        vocab_size: int | None = None,
        position_weighting: bool = False,
        shuffled: bool = False,
    ) -> None:
        self.seq_length, self.layout = seq_length, layout
        self.vocab_size = vocab_size or layout.vocabulary
        self._paths = find_packed([paths] if isinstance(paths, str) else paths)
        self._sizes = sizes = self._look()
        self._ends = list(accumulate(size // (seq_length + 1) for size in sizes))  # in windows
        self._tokens = sum(sizes)
        self._maps = Maps(random=shuffled and self._tokens * WORD.itemsize >= LARGE)
        self._weights = (
            np.tanh(np.arange(layout.positions) / 10).astype(np.float32)  # (positions,)
            if position_weighting
            else None
        )
        names = [f"{Path(p).name} {size}" for p, size in zip(self._paths, sizes, strict=True)]
        facts = [f"packed {seq_length} {layout} {position_weighting}", *names]
        self.fingerprint = hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        path, begin, words = self._window(index)  # words (l + 1,)
        tokens = words & (self.layout.vocabulary - 1)  # (l + 1,)
        if self._is_foreign(words, tokens):
            raise self._fault(path, begin, words, tokens)
        positions = words >> self.layout.token_bits & (self.layout.positions - 1)  # (l + 1,)
        begins = (positions[1:] < positions[:-1]) | (positions[1:] == 0)  # (l,)
        counts = (words[1:] >> LOSS_BIT).astype(bool) & ~begins  # (l,)
        ids = tokens.astype(np.int64)  # (l + 1,)
        targets = np.where(counts, ids[1:], IGNORED)  # (l,)
        weights = None
        if self._weights is not None:
            weights = torch.from_numpy(self._weigh(positions, begins) * counts)  # (l,)
        documents = numbered(np.concatenate(([False], begins[:-1])))  # (l,)
        return Sample(torch.from_numpy(ids[:-1]), torch.from_numpy(targets), weights, documents)

    @property
    def files(self) -> list[str]:
        return self._paths

    def described(self) -> str:
        return f"{self._tokens:,} tokens in {len(self._paths)} files"

    def is_here(self) -> bool:
        return Path(self._paths[0]).is_file()

    def _window(self, index: int) -> tuple[str, int, NDArray[np.int32]]:
        """Return a window's file, its first token's number there, and its words (l + 1,)."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        length = self.seq_length + 1
        begin = (index - (self._ends[number - 1] if number else 0)) * length
        return self._paths[number], begin, self._read(number, begin, length)

    def _weigh(
        self, positions: NDArray[np.int32], begins: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Return the weight of each target by position; positions (l + 1,), begins (l,) -> (l,)."""
        assert self._weights is not None
        # Where each document's part of the window begins, and where the window ends.
        bounds = np.concatenate(([0], np.flatnonzero(begins) + 1, [len(positions)]))  # (parts + 1,)
        bases = np.repeat(positions[bounds[:-1]], np.diff(bounds))  # (l + 1,)
        rebased = positions - bases  # (l + 1,)
        return self._weights[rebased[1:]]  # (l,)

    def _fault(
        self, path: str, begin: int, words: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> RequestError:
        at = int(np.argmax((words < 0) | (tokens >= self.vocab_size)))
        what = (
            f"bit 31 is set (word {int(words[at]) & 0xFFFFFFFF:#010x}): the file is not packed data"
            if words[at] < 0
            else f"the id {tokens[at]:,} is not below the vocabulary's size, {self.vocab_size:,}: "
            "the file is of another tokenizer or another layout; fix: tokenize it for this model, "
            "or name its layout (packed-17/13:)"
        )
        return RequestError(f"{path}: token {begin + at:,}: {what}", local=True)

    def _read(self, number: int, begin: int, count: int) -> NDArray[np.int32]:
        """Read `count` words of a file, (count,), from word `begin` on."""
        size = self._sizes[number] * WORD.itemsize
        return self._maps.read(self._paths[number], WORD, begin * WORD.itemsize, count, size)

    def _look(self) -> list[int]:
        """Count each file's tokens, and refuse files whose first words show that they are wrong.

        Data without any loss bit, such as plain ids, would be trained on without any target.
        """
        sizes, is_marked, fault = [], False, None
        for path in self._paths:
            size, words = _opened(path, PROBE)  # words: (tokens that are looked at,)
            tokens = words & (self.layout.vocabulary - 1)  # the same
            is_marked = is_marked or bool((words >> LOSS_BIT & 1).any())
            if fault is None and self._is_foreign(words, tokens):
                fault = self._fault(path, 0, words, tokens)
            sizes.append(size)
        if not is_marked:
            raise RequestError(
                f"{self._paths[0]}: no loss bit (bit {LOSS_BIT}) is set in the first {PROBE:,} "
                "words of any file, so no target would count; fix: write them with it"
            )
        if fault is not None:
            raise fault
        return sizes

    def _is_foreign(self, words: NDArray[np.int32], tokens: NDArray[np.int32]) -> bool:
        return bool(words.min() < 0 or tokens.max() >= self.vocab_size)


class PackedWriter:
    """Writes a packed file and its PATH.size, which get their names once they are safely on disk.

    A context manager. If it is left by an error, an older file stays in place. Raises RequestError,
    naming the document by its number from 0, for what the layout cannot hold.
    """

    def __init__(self, path: str | Path, *, layout: Layout = LAYOUTS["16/14"]) -> None:
        self.path, self.layout = Path(path), layout
        self.documents = self.tokens = 0
        self._partial = partial(self.path)

    def __enter__(self) -> PackedWriter:
        with writing(self.path):
            self._file = self._partial.open("wb")
        return self

    def write(self, tokens: ArrayLike, counts: ArrayLike | None = None) -> None:
        """Append one document: ids (n,), and which count as targets (n,), by default all."""
        ids = self._checked(np.asarray(tokens))  # (n,)
        marks = np.ones(len(ids), bool) if counts is None else np.asarray(counts, bool)  # (n,)
        if marks.shape != ids.shape:
            raise self._refusal(f"has {len(ids):,} tokens, but {marks.size:,} marks of what counts")
        words = words_of(ids, self.layout, marks)  # (n,)
        with writing(self.path):
            self._file.write(words.tobytes())
        self.documents += 1
        self.tokens += len(ids)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with writing(self.path):
                self._file.close()
                if kind is None:
                    self._publish()
        finally:
            self._partial.unlink(missing_ok=True)

    def _checked(self, ids: NDArray[np.generic]) -> NDArray[np.generic]:
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise self._refusal("is not a list of integers")
        if len(ids) > self.layout.positions:
            raise self._refusal(
                f"has {len(ids):,} tokens, and {self.layout.position_bits} bits hold positions "
                f"below {self.layout.positions:,}; fix: split it"
            )
        for extreme in (ids.min(), ids.max()) if ids.size else ():
            if not 0 <= int(extreme) < self.layout.vocabulary:
                raise self._refusal(
                    f"has the id {int(extreme):,}, and {self.layout.token_bits} bits hold ids from "
                    f"0 to {self.layout.vocabulary - 1:,}"
                )
        return ids

    def _refusal(self, what: str) -> RequestError:
        return RequestError(f"{self.path}: document {self.documents:,} {what}")

    def _publish(self) -> None:
        if not self.tokens:
            raise RequestError(f"{self.path}: no token was written; fix: give it a document")
        side = self.path.with_name(self.path.name + SIZE)
        staging = partial(side)
        staging.write_text(f"{self.tokens}\n")
        try:
            side.unlink(missing_ok=True)  # an older file's size never stands beside this one
            publish(self._partial, self.path)
            publish(staging, side)
        finally:
            staging.unlink(missing_ok=True)


def partial(path: Path) -> Path:
    """Return a new name at each call for a file being written; no pattern for data matches it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def publish(written: Path, path: Path) -> None:
    """Give a fully written file its name once it is safely on disk."""
    for place, rename in ((written, True), (path.parent, False)):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if rename:
            written.rename(path)


def count_tokens(pattern: str) -> int:
    """Count the tokens of files by name or pattern. Raises RequestError as Packed does."""
    return sum(_opened(path, 0)[0] for path in find_packed([pattern]))


def require_held_out(held_out: Sequence[str], trained: Sequence[str]) -> None:
    """Refuse to evaluate on files that are trained on. Raises RequestError naming the first."""
    seen = {Path(file).resolve() for file in trained}
    for file in sorted(held_out):
        if Path(file).resolve() in seen:
            raise RequestError(f"{file} is trained on; fix: hold out other files")


def find_packed(patterns: Sequence[str]) -> list[str]:
    """Find the files of all patterns, sorted, each once.

    A PATH.size beside its PATH is left out. Raises RequestError if a pattern matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        # The name of an existing file is taken literally, whatever it would mean as a pattern.
        matches = [pattern] if Path(pattern).is_file() else glob(pattern, recursive=True)  # noqa: PTH207
        files = {path for path in matches if Path(path).is_file()}
        kept = {path for path in files if path.removesuffix(SIZE) not in files - {path}}
        if not kept:
            raise RequestError(
                f"no file matches {pattern!r}; fix: give packed files by name or pattern"
            )
        found |= kept
    if not found:
        raise RequestError("no packed files are given; fix: give at least one")
    return sorted(found)


def _opened(path: str, count: int) -> tuple[int, NDArray[np.int32]]:
    """Return a file's number of tokens, checked against its PATH.size, and its first `count` words.

    There are fewer words if the file has no more.
    """
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            words = np.fromfile(file, WORD, count)  # (count,), or fewer
        noted = None
        with suppress(FileNotFoundError):
            noted = Path(path + SIZE).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"{path}: it or its {SIZE} cannot be read: {why}") from error
    if not size:
        raise RequestError(f"{path}: is empty; fix: take it out of the data")
    if size % WORD.itemsize:
        raise RequestError(
            f"{path}: has {size:,} bytes, which is not a multiple of {WORD.itemsize}: "
            "it is cut off, or is not packed data"
        )
    tokens = size // WORD.itemsize
    if noted is not None and noted != str(tokens):
        raise RequestError(
            f"{path}: has {tokens:,} tokens, but {path}{SIZE} says {noted[:40]!r}; "
            "fix: copy both again, or remove the one that is wrong"
        )
    return tokens, words
