r"""The documents to tokenize: local files, a set on disk, or a set of the hub.

All are read through the library datasets, which keeps them as memory-mapped files in its cache
(HF_HOME), so documents can be looked up by number. It reads \r\n in .txt files as \n. Code that
comes with a set is never run.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from training.data.libraries import datasets_library
from training.data.one_column import NoTextError
from training.data.remote import is_url
from training.data.splits import NoSplit, find, is_local
from training.errors import RequestError, TrainingError

SAMPLES_BY = ("document", "paragraph", "line")
LARGEST_TEXT = 2**31 - 1
"""The most bytes that a text can have in arrow's strings."""
DRYRUN, DRYRUN_SEED = 8192, 42
LEAST_SHARD, MOST_SHARD, SHARDS = 2**18, 2**23, 256
"""Bytes per shard: a 256th of all, between 256 KiB and 8 MiB."""
AT_ONCE = 10_000
"""Documents whose lengths are looked up at once."""


@dataclass(frozen=True)
class Texts:
    """Documents by number; cheap to send to another process, as the text stays on disk.

    sizes (documents,): bytes of each in UTF-8, int64. content: the library's own fingerprint, which
    changes with the texts even if their lengths do not. It depends on what a set on disk was made
    of, on the paths and times of files, and on the revision of a set of the hub.
    """

    dataset: Any
    column: str
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    content: str

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Identical for texts of the same lengths in the same order, wherever they are."""
        return hashlib.blake2b(self.sizes.tobytes(), digest_size=16).hexdigest()

    def read(self, first: int, end: int) -> list[str]:
        """Read documents first ... end - 1; a missing text is empty.

        Raises RequestError for a text that is not in UTF-8, which the JSON reader does not check.
        """
        column = self.dataset[first:end].column(self.column)
        try:
            return [text or "" for text in column.to_pylist()]
        except UnicodeDecodeError as error:
            raise self._fault(column, first) from error

    def _fault(self, column: Any, first: int) -> RequestError:
        """Make the error for the text not in UTF-8 in a column that begins with text `first`."""
        for number, text in enumerate(column, first + 1):
            try:
                text.as_py()
            except UnicodeDecodeError as error:
                return RequestError(
                    f"--dataset: text {number:,} of {len(self):,} is not in UTF-8 (byte "
                    f"{error.start:,} of it: {error.reason}); fix: write its file in UTF-8, or "
                    "leave it out"
                )
        raise AssertionError("every text is in UTF-8")

    def shards(self) -> list[tuple[int, int]]:
        """Divide the documents into runs (first, end), which depend only on the lengths."""
        size = min(MOST_SHARD, max(LEAST_SHARD, int(self.sizes.sum()) // SHARDS))
        begins = self.sizes.cumsum() - self.sizes  # (documents,)
        edges = np.flatnonzero(np.diff(begins // size)) + 1  # (shards - 1,)
        return list(zip([0, *edges.tolist()], [*edges.tolist(), len(self)], strict=True))


def open_texts(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    sample_by: str = "document",
    dryrun: bool = False,
) -> Texts:
    """Open the documents of a source; with dryrun, the 8192 that the known scripts take.

    Raises RequestError if the source or its column is missing, or there is no text.
    """
    dataset = _load(name, config, split, column, sample_by)
    if column not in dataset.column_names:
        raise _no_text(name, NoTextError(column, dataset.column_names))
    kind = getattr(dataset.features[column], "dtype", "a structure")
    if kind not in ("string", "large_string"):
        raise _no_text(name, NoTextError(column, dataset.column_names, kind))
    content = str(dataset._fingerprint)
    dataset = dataset.select_columns([column])
    if dryrun:
        some = range(min(DRYRUN, len(dataset)))
        dataset = dataset.shuffle(seed=DRYRUN_SEED).select(some)
    dataset = dataset.with_format("arrow")
    sizes = np.concatenate([np.zeros(0, np.int64), *_sizes(dataset, column)])  # (documents,)
    missing = int((sizes < 0).sum())
    sizes = sizes.clip(min=0)  # (documents,)
    if not sizes.any():
        raise RequestError(f"--dataset: {name} has no text in column {column!r}")
    if missing:
        print(
            f"warning: {missing:,} of {len(sizes):,} rows of {name} have nothing in column "
            f"{column!r}: each is an empty text",
            file=sys.stderr,
        )
    return Texts(dataset, column, sizes, content)


def _sizes(dataset: Any, column: str) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Yield the lengths, batch by batch, without reading the text; -1 for a missing text."""
    import pyarrow.compute as pc

    for table in dataset.iter(batch_size=AT_ONCE):
        lengths = pc.fill_null(pc.binary_length(table.column(column)), -1)
        yield lengths.to_numpy().astype(np.int64)  # (documents of the batch,)


def _no_text(where: str, error: NoTextError) -> RequestError:
    return RequestError(
        f"--text_column: {where} has {error}; fix: name a column in which each row has a text"
    )


def _load(name: str, config: str | None, split: str, column: str, sample_by: str) -> Any:
    datasets = datasets_library("--dataset: texts are read")
    if not is_local(name):
        with _reporting(name, hub=True):
            return datasets.load_dataset(name, config, split=split)
    try:
        local = find(name, config or "")
        for one in {part.partition("[")[0].strip() for part in split.split("+")}:
            files = local.files(one)
            for warning in local.warnings(one):
                print(f"warning: {warning}", file=sys.stderr)
            print(f"reading {local.described(one)}")
            if sample_by == "document":
                _check_sizes(files)
    except NoSplit as error:
        raise RequestError(f"--split: {error}") from error
    except RequestError as error:
        raise RequestError(f"--dataset: {error}") from error
    with _reporting(name):
        return local.load(split, column, sample_by=sample_by)


def _check_sizes(files: Sequence[str]) -> None:
    for path in files:
        is_text = ".txt" in PurePosixPath(path).suffixes and not is_url(path)
        if is_text and Path(path).stat().st_size > LARGEST_TEXT:
            raise RequestError(
                f"{path} is over 2 GiB, too large for one document; "
                f"fix: use --sample_by=paragraph or line"
            )


class _reporting:  # noqa: N801, used as a phrase: with _reporting(name)
    """Turn whatever datasets raises into one line."""

    def __init__(self, name: str, *, hub: bool = False) -> None:
        self.name, self.hub = name, hub

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, RequestError):
            raise RequestError(f"--dataset: {error}") from error
        for cause in causes(error):
            if isinstance(cause, OSError) and cause.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EFBIG,
                errno.EROFS,
            ):
                raise TrainingError(
                    f"the cache of datasets cannot be written: {cause.strerror}; fix: set HF_HOME "
                    f"to a folder with room"
                ) from error
        reason = reason_of(error)
        file = _file_of(error)
        for cause in causes(error):
            if isinstance(cause, NoTextError):
                raise _no_text(file or self.name, cause) from error
        where = f"{file if file and not self.hub else self.name} cannot be read"
        fix = "" if self.hub or "; fix: " in reason else "; fix: correct the file, or leave it out"
        if self.hub:
            where = f"{self.name} is not a local file or folder, and the hub does not give it"
            if isinstance(error, RuntimeError) and "script" in str(error):
                folder = f"./{self.name.rpartition('/')[2]}"
                reason += (
                    " (other people's code is never run; the hub may have it in parquet: hf "
                    f"download {self.name} --repo-type=dataset --revision=refs/convert/parquet "
                    f"--local-dir={folder}, then --dataset={folder}/CONFIG)"
                )
        raise RequestError(f"--dataset: {where}: {reason}{fix}") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the chain of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _file_of(error: BaseException) -> str:
    """Find the file that the library was reading, in its generator's state; empty if none."""
    for cause in causes(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            # The generator ended with the error, or is suspended while its result is processed.
            waiting = (one.gi_frame for one in frame.f_locals.values() if inspect.isgenerator(one))
            for state in (frame, *waiting):
                if state is not None and state.f_code.co_name == "_generate_tables":
                    file = state.f_locals.get("file")
                    # A file that was unpacked for reading knows the original.
                    origin = getattr(file, "get_origin", lambda file=file: file)()
                    if isinstance(origin, str):
                        return origin
    return ""


def reason_of(error: BaseException) -> str:
    """State the root cause of an error in one line."""
    last = list(causes(error))[-1]
    # How the library fails if no file has a row, with known columns and with unknown ones.
    if str(last).endswith("corresponds to no data!") or isinstance(last, StopIteration):
        return "there is nothing in it; fix: give files that have texts"
    if type(last).__name__ == "CastError":
        found = ", ".join(getattr(last, "table_column_names", ()))
        wanted = ", ".join(getattr(last, "requested_column_names", ()))
        if found != wanted:
            return (
                f"its columns ({found}) are not those of the first file ({wanted}); fix: give "
                "files with the same columns"
            )
    return " ".join(str(last).split()) or type(last).__name__
