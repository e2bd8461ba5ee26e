"""JSON lines: *.json and *.json.gz files of a folder, each line an object with tokens and a mask.

A pattern of names, such as FOLDER/*.json.gz, selects the files instead.

A line is {"input_ids": [...], "attention_mask": [...]}, both of one length; the mask has 1 for text
and 0 for padding. Each file is converted once, to a binary file in a cache folder, which is read
from then on. Its name depends on the file's path, size and time of change, so a changed file is
converted again; its old conversion may be deleted. A conversion that was killed continues with the
file it was at. Processes that start at the same time convert different files if the file system
has locks; if it has none, some are converted more than once, with the same result.

A converted file is little-endian: four int64 (a mark, the number of lines, the number of tokens and
the largest id), the tokens as int32 (padding as its complement ~id), and the end of each line as
int64.

Shapes: l sequence length, n tokens of a line.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import time
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from training.data.base import Sample, numbered
from training.data.files import LARGE, Maps
from training.data.packed import partial, publish
from training.data.splits import TEXT
from training.errors import RequestError, TrainingError, writing
from training.ops.loss import IGNORED

PATTERNS = ("*.json", "*.json.gz")
KEYS = ("input_ids", "attention_mask")
CACHE = ".lines"
MARK = int.from_bytes(b"lines 01", "little")
NUMBER, TOKEN = np.dtype("<i8"), np.dtype("<i4")
HEADER = 4 * NUMBER.itemsize
LARGEST = (1 << 31) - 1
ABANDONED = 3600.0
"""Seconds without a write after which a half-written file counts as a dead process's."""


class NotConverted(Exception):  # noqa: N818 - not an error: there is work to do first
    """Some files have no converted form yet."""


@dataclass(frozen=True)
class Converted:
    """A file's converted form."""

    path: str
    lines: int
    tokens: int
    largest: int

    @property
    def ends(self) -> int:
        """The byte at which the line ends begin, after the tokens."""
        return HEADER + self.tokens * TOKEN.itemsize

    @property
    def size(self) -> int:
        return self.ends + self.lines * NUMBER.itemsize


class Lines:
    """The lines of a folder's files, sorted by name, as samples (see training.data.base).

    The target of an input is the token after it, or -100 if there is none or either is padding. A
    line of more than l + 1 tokens is cropped to l + 1 consecutive ones, from a place that is a pure
    function of the sample's number and the seed; a shorter one is filled up with 0. A line is one
    document, which begins after the padding before it; with a `document_end` it is several, each of
    which ends with that token.

    The cache is `cache`, or CACHE in the folder. If the latter cannot be written, what it lacks is
    in a folder in `data_cache`, if that is given. shuffled: lines are read in random order. Raises
    RequestError for a folder without files or lines, a cache that cannot be written, and a bad
    line, naming its file and number; without `convert`, NotConverted if files are not converted.
    """

    knows_documents = True

    def __init__(
        self,
        folder: str | Path,
        seq_length: int,
        *,
        seed: int,
        cache: str | Path | None = None,
        data_cache: str = "",
        document_end: int = -1,
        shuffled: bool = False,
        convert: bool = True,
    ) -> None:
        self.seq_length, self._seed, self._document_end = seq_length, seed, document_end
        paths, own = find_lines(Path(folder))
        caches = [Path(cache)] if cache else _caches_of(own, data_cache)
        self._parts = converted(paths, *caches, convert=convert)
        self._ends = list(accumulate(part.lines for part in self._parts))
        if not len(self):
            raise RequestError(f"{folder}: its files have no lines; fix: write some")
        self._tokens = sum(part.tokens for part in self._parts)
        size = sum(part.size for part in self._parts)
        self._maps = Maps(random=shuffled and size >= LARGE)
        self.vocab_size = max(part.largest for part in self._parts) + 1
        names = [
            f"{path.name} {part.lines} {part.tokens}"
            for path, part in zip(paths, self._parts, strict=True)
        ]
        facts = "\n".join([f"lines {seq_length} {seed}", *names])
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        marked = self._line(index)  # (k,), k <= l + 1
        ids = _unmarked(marked).astype(np.int64)  # (k,)
        counts = (marked[:-1] >= 0) & (marked[1:] >= 0)  # (k - 1,)
        length = self.seq_length
        inputs = np.zeros(length, np.int64)  # (l,)
        targets = np.full(length, IGNORED, np.int64)  # (l,)
        inputs[: len(ids)] = ids[:length]
        targets[: len(counts)] = np.where(counts, ids[1:], IGNORED)
        is_text = np.zeros(length, bool)  # (l,)
        is_text[: len(ids)] = marked[:length] >= 0
        # Where a document ends, or padding before one: the token after it may begin a document.
        ends = ~is_text | (inputs == self._document_end)  # (l,)
        begins = np.concatenate(([False], ends[:-1])) & is_text  # (l,)
        documents = numbered(begins)  # (l,)
        return Sample(torch.from_numpy(inputs), torch.from_numpy(targets), None, documents)

    def described(self) -> str:
        return f"{self._tokens:,} tokens in {len(self):,} lines of {len(self._parts)} files"

    def is_here(self) -> bool:
        return Path(self._parts[0].path).is_file()

    def _line(self, index: int) -> NDArray[np.int32]:
        """Read a line's tokens, cropped to l + 1 if there are more."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        line = index - (self._ends[number - 1] if number else 0)
        first = max(line - 1, 0)  # a line begins where the one before it ends
        place = part.ends + first * NUMBER.itemsize
        ends = self._maps.read(part.path, NUMBER, place, line - first + 1, part.size)
        begin, end = (int(ends[0]) if line else 0), int(ends[-1])
        spare = end - begin - (self.seq_length + 1)
        if spare > 0:
            begin += _drawn(f"{self._seed}/{index}", spare + 1)
            end = begin + self.seq_length + 1
        place = HEADER + begin * TOKEN.itemsize
        return self._maps.read(part.path, TOKEN, place, end - begin, part.size)


def _caches_of(folder: Path, data_cache: str) -> list[Path]:
    """Return where to write a folder's converted files, then where else some may already be."""
    cache = folder / CACHE
    if not data_cache:
        return [cache]
    with suppress(OSError):  # the data may be read-only
        cache.mkdir(exist_ok=True)
    if os.access(cache, os.W_OK | os.X_OK):
        return [cache]
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    others = [cache] if os.access(cache, os.R_OK | os.X_OK) else []
    return [Path(data_cache, f"{CACHE}-{digest}"), *others]


def converted(
    paths: list[Path], cache: Path, *others: Path, convert: bool = True
) -> list[Converted]:
    """Find the converted form of each file in `cache` or `others`, or make it in `cache`.

    Without `convert`, raises NotConverted if some have none.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"{cache}: cannot be made: {error.strerror}; fix: set data_cache to another folder"
        ) from error
    places = [_place(path, cache) for path in paths]
    parts = [_read(place) for place in places]
    for other in others:
        parts = [
            part or _read(_place(path, other)) for path, part in zip(paths, parts, strict=True)
        ]
    if None in parts and not convert:
        raise NotConverted(f"{cache}: not all files are converted")
    if None in parts and not os.access(cache, os.W_OK):
        raise RequestError(f"{cache}: cannot be written; fix: set data_cache to another folder")
    for wait in (False, True):  # files that other processes are converting come last
        for number, (path, place) in enumerate(zip(paths, places, strict=True)):
            if parts[number] is not None:
                continue
            with _locked(place, wait=wait) as mine:
                if mine:
                    parts[number] = _read(place) or _convert(path, place)
    return [part for part in parts if part is not None]


def find_lines(given: Path) -> tuple[list[Path], Path]:
    """Return the files of a folder, or those that a pattern in it matches, and the folder."""
    patterns: tuple[str, ...] = PATTERNS
    folder = given
    if has_magic(given.name) and not given.is_dir():
        patterns, folder = (given.name,), given.parent
    try:
        paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        paths = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    except OSError as error:
        raise RequestError(f"{folder}: cannot be read: {error.strerror}") from error
    if not paths:
        others = [one for one in (*PATTERNS, "*.jsonl", "*.jsonl.gz") if any(folder.glob(one))]
        fix = (
            f", but {others[0]}; fix: write lines:{folder}/{others[0]}"
            if others
            else "; fix: give their folder"
        )
        raise RequestError(f"{folder}: has no {' or '.join(patterns)} files{fix}")
    return paths, folder


def _place(path: Path, cache: Path) -> Path:
    try:
        state = path.stat()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error
    facts = f"{MARK} {path.resolve()} {state.st_size} {state.st_mtime_ns}"
    return cache / f"{path.name}.{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"


def _read(place: Path) -> Converted | None:
    """Read a converted file's header; None if the file is missing or incomplete."""
    try:
        with place.open("rb") as file:
            header = file.read(HEADER)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(f"{place}: cannot be read: {error.strerror}; fix: delete it") from error
    if len(header) < HEADER:
        return None
    mark, lines, tokens, largest = np.frombuffer(header, NUMBER).tolist()
    part = Converted(str(place), lines, tokens, largest)
    return part if mark == MARK and size == part.size else None


@contextmanager
def _locked(place: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file to make it; yield False if another process, which is alive, has the lock."""
    with writing(place):
        lock = place.with_name(f".{place.name}.lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:  # no locks here: others may do the same work, under other partial names
            pass
        yield True


def _convert(path: Path, place: Path) -> Converted:
    """Convert a file, and remove the partial files that dead processes left of it."""
    for left in place.parent.glob(f".{escape(path.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
    written = partial(place)
    try:
        with writing(place):
            with written.open("wb") as file:
                part = _write(path, file, place)
            if _place(path, place.parent) != place:
                raise TrainingError(
                    f"{path}: changed while it was read; fix: start again", local=True
                )
            publish(written, place)
    finally:
        written.unlink(missing_ok=True)
    return part


def _write(path: Path, file: BinaryIO, place: Path) -> Converted:
    """Write the converted form: the tokens, the line ends, and last the header in front."""
    ends, tokens, largest = array("q"), 0, 0
    file.seek(HEADER)
    for marked in _parsed(path):
        file.write(marked.astype(TOKEN).tobytes())
        tokens += len(marked)
        ends.append(tokens)
        largest = max(largest, int(_unmarked(marked).max()))
    file.write(np.asarray(ends, NUMBER).tobytes())
    file.seek(0)
    file.write(np.array([MARK, len(ends), tokens, largest], NUMBER).tobytes())
    return Converted(str(place), len(ends), tokens, largest)


def _parsed(path: Path) -> Iterator[NDArray[np.int64]]:
    """Yield the ids (n,) of each line, padding as ~id; empty lines are skipped."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _marked(line, f"{path}: line {number:,}")
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"{path}: cannot be read after line {number:,}: {why}") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _marked(line: bytes, where: str) -> NDArray[np.int64]:
    """Check a line and return its ids, (n,), padding as ~id."""
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError(f"{where}: is not a JSON object; fix: write one a line, with {KEYS}")
    ids, mask = (_integers(given, key, where) for key in KEYS)  # (n,) each
    if len(ids) != len(mask):
        raise RequestError(
            f"{where}: has {len(ids):,} input_ids, but an attention_mask of {len(mask):,}; "
            "fix: make both of one length"
        )
    if ids.min() < 0 or ids.max() > LARGEST:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise RequestError(f"{where}: the id {wrong:,} is not from 0 to {LARGEST:,}")
    if not np.isin(mask, (0, 1)).all():
        raise RequestError(f"{where}: attention_mask has numbers other than 0 and 1")
    return np.where(mask == 1, ids, ~ids)  # (n,)


def _unmarked(marked: NDArray[Any]) -> NDArray[Any]:
    """Return plain ids, also for padding: (n,) -> (n,)."""
    return np.where(marked < 0, ~marked, marked)  # (n,)


def _integers(given: dict[str, Any], key: str, where: str) -> NDArray[np.int64]:
    if key not in given:
        texts = "; fix: read texts by stream:FOLDER, or tokenize them" if TEXT in given else ""
        raise RequestError(f"{where}: has no {key}; a line needs {' and '.join(KEYS)}{texts}")
    value = given[key]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where}: {key} is not a list, or is empty")
    try:
        numbers = np.asarray(value)  # (n,)
    except ValueError:  # lists of different lengths
        numbers = np.empty(0)
    if numbers.ndim != 1 or numbers.dtype != np.int64:
        raise RequestError(f"{where}: {key} is not a list of integers")
    return numbers


def _drawn(key: str, count: int) -> int:
    """Return a number below `count` that is a pure function of the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count
