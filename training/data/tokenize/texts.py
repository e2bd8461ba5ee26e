r"""The documents that are tokenized: local files, a set on disk, or a set of the hub.

All are read through the library datasets, which keeps them as memory-mapped files in its cache
(HF_HOME), so a document is found by its number. It reads \r\n in .txt files as \n. Code that comes
with a set is never run.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic, iglob
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from training.errors import RequestError, TrainingError

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
SAMPLES_BY = ("document", "paragraph", "line")
LARGEST_TEXT = 2**31 - 1
"""Bytes of one text, the most that arrow's strings hold."""
DRYRUN, DRYRUN_SEED = 8192, 42
LEAST_SHARD, MOST_SHARD, SHARDS = 2**18, 2**23, 256
"""Bytes of a shard: a 256th of all, between 256 KiB and 8 MiB."""
AT_ONCE = 10_000
"""Documents whose lengths are looked up at once."""


def is_local(name: str) -> bool:
    """Whether files are meant, which may be missing, rather than a set of the hub."""
    return Path(name).exists() or has_magic(name) or name.startswith((".", "/", "~"))


def find_files(name: str) -> tuple[str, list[str]]:
    """Find the files of a folder or a pattern, sorted, and their builder. Raises RequestError."""
    pattern = f"{name}/**/*" if Path(name).is_dir() else name
    found = sorted(path for path in iglob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207
    if not found:
        raise RequestError(f"no file matches {pattern}")
    return builder_of(name, found)


def builder_of(name: str, paths: Sequence[str]) -> tuple[str, list[str]]:
    """Choose the builder by the endings; the files that it reads. Raises RequestError."""
    known: dict[str, list[str]] = {}
    for path in paths:
        endings = [end for end in PurePosixPath(path).suffixes if end not in COMPRESSED]
        if endings and endings[-1] in BUILDERS:
            known.setdefault(BUILDERS[endings[-1]], []).append(path)
    if not known:
        raise RequestError(
            f"{name} has no file that is known by its ending; "
            f"they are {', '.join(BUILDERS)}, also with {', '.join(COMPRESSED)}"
        )
    if len(known) > 1:
        raise RequestError(
            f"{name} has files of several kinds ({', '.join(sorted(known))}); "
            f"name one with a pattern, such as '{name}/**/*.txt'"
        )
    ((builder, files),) = known.items()
    return builder, files


@dataclass(frozen=True)
class Texts:
    """Documents by number. Small when it is sent to another process: the text stays on disk.

    sizes (documents,): bytes of each in UTF-8, int64.
    """

    dataset: Any
    column: str
    sizes: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def fingerprint(self) -> str:
        """The same for texts of the same lengths in the same order, wherever they lie."""
        return hashlib.blake2b(self.sizes.tobytes(), digest_size=16).hexdigest()

    def read(self, first: int, end: int) -> list[str]:
        """Read the documents first ... end - 1; a missing one is empty."""
        found = self.dataset[first:end].column(self.column).to_pylist()
        return [text or "" for text in found]

    def shards(self) -> list[tuple[int, int]]:
        """Divide the documents into runs (first, end); nothing but the lengths decides."""
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
    """Find the documents of a source; with dryrun, the 8192 that the known scripts take.

    Raises RequestError if the source, its column or its text is not there.
    """
    dataset = _load(name, config, split, sample_by)
    if column not in dataset.column_names:
        raise RequestError(
            f"--text_column: {name} has no column {column!r}; there are: "
            f"{', '.join(sorted(dataset.column_names)) or 'none'}"
        )
    kind = getattr(dataset.features[column], "dtype", "a structure")
    if kind not in ("string", "large_string"):
        raise RequestError(f"--text_column: {column!r} of {name} holds {kind}, not text")
    dataset = dataset.select_columns([column])
    if dryrun:
        some = range(min(DRYRUN, len(dataset)))
        dataset = dataset.shuffle(seed=DRYRUN_SEED).select(some)
    dataset = dataset.with_format("arrow")
    sizes = np.concatenate([np.zeros(0, np.int64), *_sizes(dataset, column)])  # (documents,)
    if not sizes.any():
        raise RequestError(f"--dataset: {name} has no text in column {column!r}")
    return Texts(dataset, column, sizes)


def _sizes(dataset: Any, column: str) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Look up the lengths alone, which takes no reading of the text."""
    import pyarrow.compute as pc

    for table in dataset.iter(batch_size=AT_ONCE):
        lengths = pc.fill_null(pc.binary_length(table.column(column)), 0)
        yield lengths.to_numpy().astype(np.int64)  # (documents of the batch,)


def _load(name: str, config: str | None, split: str, sample_by: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise RequestError(
            "--dataset: texts are read by the library datasets, which is not installed "
            "(pip install datasets)"
        ) from error
    # Releases before 4 run a set's own code unless they are told not to.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # type: ignore[attr-defined]
    # What goes wrong is told here, in one line.
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if not is_local(name):
        with _told(name, hub=True):
            return datasets.load_dataset(name, config, split=split)
    if config is not None:
        raise RequestError(f"--dataset_config: {name} is local, and local files have none")
    folder = Path(name)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        with _told(name):
            found = datasets.load_from_disk(name)
        if isinstance(found, datasets.Dataset):
            found = datasets.DatasetDict({str(found.split or "train"): found})
        if split not in found:
            raise RequestError(
                f"--split: {name} has no split {split!r}; there are: {', '.join(found)}"
            )
        return found[split]
    if split != "train":
        raise RequestError(f"--split: local files are all of split 'train', not {split!r}")
    builder, files = _files(name)
    options = {"sample_by": sample_by, "keep_linebreaks": True} if builder == "text" else {}
    if builder == "text" and sample_by == "document":
        _check_sizes(files)
    with _told(name):
        return datasets.load_dataset(builder, data_files=files, split=split, **options)


def _files(name: str) -> tuple[str, list[str]]:
    try:
        return find_files(name)
    except RequestError as error:
        raise RequestError(f"--dataset: {error}") from error


def _check_sizes(files: list[str]) -> None:
    for path in files:
        if Path(path).stat().st_size > LARGEST_TEXT:
            raise RequestError(
                f"--dataset: {path} is over 2 GiB, too large for one document; "
                f"use --sample_by=paragraph or line"
            )


class _told:  # noqa: N801, used as a phrase: with _told(name)
    """Turn whatever datasets raises into one line."""

    def __init__(self, name: str, *, hub: bool = False) -> None:
        self.name, self.hub = name, hub

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        for cause in causes(error):
            if isinstance(cause, OSError) and cause.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EFBIG,
                errno.EROFS,
            ):
                raise TrainingError(
                    f"the cache of datasets cannot be written: {cause.strerror}; set HF_HOME to "
                    f"a folder with room"
                ) from error
        reason = " ".join(str(list(causes(error))[-1]).split()) or type(error).__name__
        where = f"{self.name} cannot be read"
        if self.hub:
            where = f"{self.name} is no local file or folder, and the hub does not give it"
            if isinstance(error, RuntimeError) and "script" in str(error):
                reason += " (code of others is never run: take a copy of the set in parquet)"
        raise RequestError(f"--dataset: {where}: {reason}") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised for."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
