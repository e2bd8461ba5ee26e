"""Read a stream's documents by shard, through the library datasets, each shard from its start.

Code that comes with a set is never run. Faults of the network are waited out for a while.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from training.config.sections import STREAM
from training.data.files import ArrowFiles
from training.data.how_to_read import lines_of_tokens
from training.data.libraries import datasets_library
from training.data.one_column import NoTextError
from training.data.remote import is_url
from training.data.splits import (
    TEXT,
    TRAIN,
    VALIDATION,
    LocalTexts,
    find,
    is_local,
)
from training.data.tokenize.blocks import IDS
from training.data.tokenize.texts import causes, reason_of
from training.errors import RequestError, TrainingError

LONGEST_WAIT = 60.0
LASTING_FAULTS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PASSING_FAULTS = (OSError, asyncio.TimeoutError)
CUT_OFF = (zlib.error, EOFError, gzip.BadGzipFile)
"""Errors of a truncated compressed file: a lost connection may be the cause; on disk they last."""
NETWORK_LIBRARIES = {"aiohttp", "httpcore", "httpx", "requests", "urllib3"}
"""Libraries whose errors mean network faults; not all of the errors are OSErrors."""

log = logging.getLogger(__name__)

T = TypeVar("T")

DOCUMENTS_AT_ONCE = 256
"""Documents that are requested from the library at once."""
SHARDS_ON_DISK = 1024
"""Runs of documents that a set on disk is divided into, if it has that many documents."""


@dataclass
class Backoff:
    """Waits after each fault in a row, twice as long as before, and gives up after `retries`.

    is_on_disk: whether the files are on this machine's disk.
    """

    name: str
    retries: int
    is_on_disk: bool = False
    first_wait: float = 1.0
    faults: int = field(default=0, init=False)

    def wait(self, error: Exception, where: str) -> None:
        """Wait. Raises TrainingError for a fault that will not pass, or one too many in a row."""
        reason = reason_of(error)
        if not is_passing(error, is_on_disk=self.is_on_disk):
            raise TrainingError(f"{self.name}: {where} cannot be read: {reason}", local=True)
        self.faults += 1
        if self.faults > self.retries:
            raise TrainingError(
                f"{self.name}: {where} cannot be reached: {reason} (stream_retries={self.retries} "
                "in a row did not help); fix: start again, to go on from the last checkpoint",
                local=True,
            )
        seconds = min(self.first_wait * 2 ** (self.faults - 1), LONGEST_WAIT)
        log.warning(
            f"WARNING: {self.name}: {where}: {reason}; try {self.faults} of {self.retries} "
            f"in {seconds:g} s"
        )
        time.sleep(seconds)

    def progress(self) -> None:
        """Note that something was read, so that the next fault is the first in a row again."""
        self.faults = 0


def is_passing(error: BaseException, *, is_on_disk: bool = False) -> bool:
    """Return whether a retry may help: for faults of the network and the disk, not of the data."""
    chain = list(causes(error))
    lasting = (*LASTING_FAULTS, *CUT_OFF) if is_on_disk else LASTING_FAULTS
    if any(isinstance(cause, lasting) for cause in chain):
        return False
    return any(
        isinstance(cause, (*PASSING_FAULTS, *CUT_OFF))
        or type(cause).__module__.partition(".")[0] in NETWORK_LIBRARIES
        for cause in chain
    )


class Shards:
    """The shards of a set of the hub, local texts, or files at URLs (separated by commas).

    `local` has the files by split, None for a set of the hub. In a set on disk, whose documents can
    be looked up by number, a shard is a run of documents; elsewhere it is a file. `names`
    identifies the files by name (a set of the hub by its own name), configuration, split and number
    of shards; `fingerprint` adds the sizes of local files. With `held_out`, local texts without
    splits, whose only split is `train`, serve as validation. Shards can be pickled: the copy looks
    for no files, and opens those that it reads. Raises RequestError if nothing is there, or if the
    split, the library, or another library that it needs for URLs is missing.
    """

    def __init__(
        self, name: str, config: str, split: str, retries: int, *, held_out: bool = False
    ) -> None:
        self.name, self.retries = name, retries
        self.local = find_local(name, config)
        if held_out and self.local and split == VALIDATION and list(self.local.splits) == [TRAIN]:
            split = TRAIN
        self.split = split
        self._files = list(self.local.files(split)) if self.local else []
        self._set = self._open(config, split)
        self._groups: dict[int, Any] = {}
        names = [file.rpartition("/")[2] for file in self._files]
        if self.is_saved:
            # The library's own set would open all its files in each process that it is sent to.
            self._set = self.tried(lambda: ArrowFiles([Path(file) for file in self._files]))
            if not len(self._set):  # earlier releases of datasets save a file without rows
                raise RequestError(f"{name}: split {split!r} has no rows; fix: give another set")
            self.count = min(len(self._set), SHARDS_ON_DISK)
            names.append(f"{len(self._set)} documents")
        else:
            self.count = int(getattr(self._set, "num_shards", None) or self._set.n_shards)
        self.names = f"{names or name} {config} {split} {self.count}"
        self.fingerprint = f"{self.names} {_sizes(self._files)}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _library()
        self.__dict__ = state

    @property
    def is_saved(self) -> bool:
        return self.local is not None and self.local.is_saved

    @property
    def files(self) -> Sequence[str]:
        """The files of the split; none for a set of the hub, whose files are not known."""
        return self._files

    def described(self) -> list[str]:
        """Describe what is read, and list what users may not expect of it."""
        if not self.local:
            return [f"split {self.split!r} of {self.name}"]
        warnings = [f"WARNING: {warning}" for warning in self.local.warnings(self.split)]
        others = [name for name in self.local.splits if name != self.split]
        rest = f" (not the splits {', '.join(others)})" if others else ""
        return [self.local.described(self.split) + rest, *warnings]

    def is_here(self) -> bool:
        """Return whether this machine has the files too, judged by one; files at URLs count."""
        return not self._files or is_url(self._files[0]) or Path(self._files[0]).is_file()

    def backoff(self) -> Backoff:
        on_disk = bool(self._files) and not any(is_url(file) for file in self._files)
        return Backoff(self.name, self.retries, on_disk)

    def where(self, shard: int) -> str:
        """Name a shard for messages."""
        if len(self._files) == self.count and not self.is_saved:
            return self._files[shard]
        return f"shard {shard + 1:,} of {self.count:,}"

    def read(self, shard: int, first: int) -> Iterator[str]:
        """Yield a shard's documents from number `first` on; those before it are skipped.

        Raises TrainingError for a document without text, and whatever the libraries raise.
        """
        begin = 0
        for table in self._read_tables(shard):
            if begin + len(table) > first:
                for number, text in enumerate(self._texts(table, shard), begin):
                    if not isinstance(text, str):
                        raise self._fault(shard, f"document {number + 1:,} has no text")
                    if number >= first:
                        yield text
            begin += len(table)

    def _read_tables(self, shard: int) -> Iterator[Any]:
        try:
            yield from self._tables(shard)
        except NoTextError as error:
            if error.kind:
                raise self._fault(shard, f"there is {error}") from error
            raise self._no_column(shard, error.columns) from error

    def _tables(self, shard: int) -> Iterator[Any]:
        if self.is_saved:
            each, more = divmod(len(self._set), self.count)
            begin = each * shard + min(shard, more)
            return self._set.rows(begin, begin + each + (shard < more), DOCUMENTS_AT_ONCE)
        found: Iterator[Any] = (
            self._own(shard).with_format("arrow").iter(batch_size=DOCUMENTS_AT_ONCE)
        )
        return found

    def _own(self, shard: int) -> Any:
        """Make a set of one shard alone."""
        if not hasattr(self._set, "shard"):  # earlier releases of datasets
            from datasets.distributed import split_dataset_by_node

            # With as many nodes as shards, each has one.
            return split_dataset_by_node(self._set, rank=shard, world_size=self.count)
        # The library divides the whole list of files for each part, so divide it in two stages.
        groups = math.isqrt(self.count)
        number, place = shard % groups, shard // groups
        if number not in self._groups:
            self._groups[number] = self._set.shard(groups, number, contiguous=False)
        group = self._groups[number]
        return group.shard(group.num_shards, place, contiguous=False)

    def _texts(self, table: Any, shard: int) -> list[Any]:
        if TEXT not in table.column_names:
            raise self._no_column(shard, table.column_names)
        found: list[Any] = table.column(TEXT).to_pylist()
        return found

    def _no_column(self, shard: int, columns: Sequence[str]) -> TrainingError:
        if IDS in columns:
            return TrainingError(
                f"{self.name} is tokenized already; fix: {self._how_tokens_are_read()}", local=True
            )
        return self._fault(shard, f"there is {NoTextError(TEXT, [*columns])}")

    def _how_tokens_are_read(self) -> str:
        if self.is_saved:
            return f"leave out {STREAM!r} before it"
        if self._files and (lines := lines_of_tokens(self._files[0], self.name)):
            return f"write {lines}"
        return (
            "save it as a set on disk, with save_to_disk of the library datasets, and give its "
            f"folder alone: {STREAM!r} reads texts"
        )

    def _fault(self, shard: int, what: str) -> TrainingError:
        return TrainingError(
            f"{self.name}: {self.where(shard)}: {what}; fix: give each document a text "
            f"in column {TEXT!r}",
            local=True,
        )

    def _open(self, config: str, split: str) -> Any:
        datasets = _library()
        local = self.local
        if local:
            return self.tried(lambda: local.load(split, streaming=True))
        return self.tried(
            lambda: datasets.load_dataset(self.name, config or None, split=split, streaming=True)
        )

    def tried(self, work: Callable[[], T]) -> T:
        """Open something, and retry after faults that may pass. Raises RequestError."""
        backoff = self.backoff()
        while True:
            try:
                return work()
            except TrainingError as error:
                raise RequestError(str(error)) from error
            except ImportError as error:
                raise RequestError(f"{self.name} cannot be read: {error}") from error
            except Exception as error:  # the libraries have many ways to say no
                try:
                    backoff.wait(error, self._files[0] if self._files else "it")
                except TrainingError as last:
                    raise RequestError(str(last)) from error


def _sizes(files: Sequence[str]) -> list[int]:
    """Return the bytes of each file on this machine, leaving out those at URLs."""
    return [Path(file).stat().st_size for file in files if not is_url(file)]


def find_local(name: str, config: str) -> LocalTexts | None:
    """Find texts that are local or at URLs; None for a set of the hub. Raises RequestError."""
    _library()
    return find(name, config) if is_local(name) else None


def _library() -> Any:
    datasets = datasets_library("streams are read")
    # Backoff does the retries here, by stream_retries.
    config: Any = datasets.config
    config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 1
    config.STREAMING_READ_RETRY_INTERVAL = config.STREAMING_OPEN_RETRY_INTERVAL = 0
    return datasets
