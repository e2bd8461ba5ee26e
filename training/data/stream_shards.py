"""The documents of a stream by shard, through the library datasets; a shard is read from its start.

Code that comes with a set is never run. Faults of the network are waited out for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from training.data.tokenize.texts import builder_of, causes, find_files, is_local
from training.errors import RequestError, TrainingError

LONGEST_WAIT = 60.0
LASTING_FAULTS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PASSING_FAULTS = (OSError, asyncio.TimeoutError, zlib.error, EOFError)
"""EOFError and zlib.error: a compressed file that a lost connection cut off."""
NETWORK_LIBRARIES = {"aiohttp", "httpcore", "httpx", "requests", "urllib3"}
"""Libraries whose errors are the network's; not all of them are OSErrors."""

log = logging.getLogger(__name__)

T = TypeVar("T")

TEXT_COLUMN = "text"
DOCUMENTS_AT_ONCE = 256
"""Documents that are taken from the library at once."""


@dataclass
class Backoff:
    """Waits after each of some faults in a row, twice as long as before, and then gives up."""

    name: str
    retries: int
    first_wait: float = 1.0
    faults: int = field(default=0, init=False)

    def wait(self, error: Exception, where: str) -> None:
        """Wait. Raises TrainingError for what does not pass, or has come too often in a row."""
        reason = reason_of(error)
        if not is_passing(error):
            raise TrainingError(f"{self.name}: {where} cannot be read: {reason}", local=True)
        self.faults += 1
        if self.faults > self.retries:
            raise TrainingError(
                f"{self.name}: {where} cannot be reached: {reason} (stream_retries={self.retries} "
                "in a row did not help); start again to go on from the last checkpoint",
                local=True,
            )
        seconds = min(self.first_wait * 2 ** (self.faults - 1), LONGEST_WAIT)
        log.warning(
            f"WARNING: {self.name}: {where}: {reason}; try {self.faults} of {self.retries} "
            f"in {seconds:g} s"
        )
        time.sleep(seconds)

    def progress(self) -> None:
        """Note that something was read: the next fault is the first in a row again."""
        self.faults = 0


def is_passing(error: BaseException) -> bool:
    """Whether trying again may help: for faults of the network and the disk, not of the data."""
    chain = list(causes(error))
    if any(isinstance(cause, LASTING_FAULTS) for cause in chain):
        return False
    return any(
        isinstance(cause, PASSING_FAULTS)
        or type(cause).__module__.partition(".")[0] in NETWORK_LIBRARIES
        for cause in chain
    )


def reason_of(error: BaseException) -> str:
    """Say in one line what is at the bottom of an error."""
    last = list(causes(error))[-1]
    return " ".join(str(last).split()) or type(last).__name__


class Shards:
    """What a name stands for: a set of the hub, local files, or files at URLs (commas between).

    `fingerprint` tells the same name, parts and files. Raises RequestError where nothing is there
    or the library or one that it needs for URLs is missing.
    """

    def __init__(self, name: str, config: str, split: str, retries: int) -> None:
        self.name, self.retries = name, retries
        self._files: list[str] = []
        self._set = self._open(config, split)
        self.count = int(getattr(self._set, "num_shards", None) or self._set.n_shards)
        names = [file.rpartition("/")[2] for file in self._files]
        self.fingerprint = f"{names or name} {config} {split} {self.count}"

    @property
    def has_no_splits(self) -> bool:
        return bool(self._files)

    def backoff(self) -> Backoff:
        return Backoff(self.name, self.retries)

    def where(self, shard: int) -> str:
        """Name a shard for messages."""
        if len(self._files) == self.count:
            return self._files[shard]
        return f"shard {shard + 1:,} of {self.count:,}"

    def read(self, shard: int, first: int) -> Iterator[str]:
        """Read a shard's documents from number `first` on; what comes before is passed over.

        Raises TrainingError for a document without text, and whatever the libraries raise.
        """
        from datasets.distributed import split_dataset_by_node

        # As many nodes as shards: each has one.
        one = split_dataset_by_node(self._set, rank=shard, world_size=self.count)
        begin = 0
        for table in one.with_format("arrow").iter(batch_size=DOCUMENTS_AT_ONCE):
            if begin + len(table) > first:
                for number, text in enumerate(self._texts(table, shard), begin):
                    if not isinstance(text, str):
                        raise self._fault(shard, f"document {number + 1:,} has no text")
                    if number >= first:
                        yield text
            begin += len(table)

    def _texts(self, table: Any, shard: int) -> list[Any]:
        if TEXT_COLUMN not in table.column_names:
            there = ", ".join(sorted(table.column_names))
            raise self._fault(shard, f"there is no column {TEXT_COLUMN!r}; there are: {there}")
        found: list[Any] = table.column(TEXT_COLUMN).to_pylist()
        return found

    def _fault(self, shard: int, what: str) -> TrainingError:
        return TrainingError(
            f"{self.name}: {self.where(shard)}: {what}; each document must have a text "
            f"in column {TEXT_COLUMN!r}",
            local=True,
        )

    def _open(self, config: str, split: str) -> Any:
        datasets = _library()
        if "://" in self.name:
            builder, self._files = builder_of(self.name, self.name.split(","))
        elif is_local(self.name):
            builder, self._files = find_files(self.name)
        else:
            return self.tried(
                lambda: datasets.load_dataset(
                    self.name, config or None, split=split, streaming=True
                )
            )
        if config:
            raise RequestError(f"dataset_config: {self.name} is no set of the hub, and has none")
        options = {"sample_by": "document", "keep_linebreaks": True} if builder == "text" else {}
        return self.tried(
            lambda: datasets.load_dataset(
                builder, data_files=self._files, split="train", streaming=True, **options
            )
        )

    def tried(self, work: Callable[[], T]) -> T:
        """Do what opens the stream, again after faults that may pass. Raises RequestError."""
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


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise RequestError(
            "streams are read by the library datasets, which is not installed "
            "(pip install datasets)"
        ) from error
    config: Any = datasets.config
    # Releases before 4 run a set's own code unless they are told not to.
    config.HF_DATASETS_TRUST_REMOTE_CODE = False
    # Whether and when to try again is decided here, by stream_retries.
    config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 1
    config.STREAMING_READ_RETRY_INTERVAL = config.STREAMING_OPEN_RETRY_INTERVAL = 0
    # What goes wrong is told in one line.
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    return datasets
