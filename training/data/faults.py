"""Faults of a network: which pass, how long is waited, and when it is given up."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from training.errors import TrainingError

LONGEST_WAIT = 60.0
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PASSING = (OSError, asyncio.TimeoutError, zlib.error, EOFError)
"""EOFError and zlib.error: a compressed file that a lost connection cut off."""
CLIENTS = {"aiohttp", "httpcore", "httpx", "requests", "urllib3"}
"""Libraries whose errors are the network's; not all of them are OSErrors."""

log = logging.getLogger(__name__)


@dataclass
class Patience:
    """Waits after each of some faults in a row, twice as long as before, and then gives up."""

    name: str
    retries: int
    first_wait: float = 1.0
    faults: int = field(default=0, init=False)

    def bear(self, error: Exception, where: str) -> None:
        """Wait. Raises TrainingError for what does not pass, or has come too often in a row."""
        reason = told(error)
        if not is_passing(error):
            raise TrainingError(f"{self.name}: {where} cannot be read: {reason}", local=True)
        self.faults += 1
        if self.faults > self.retries:
            raise TrainingError(
                f"{self.name}: {where} cannot be reached: {reason} (stream_retries={self.retries} "
                "in a row did not help); start again to go on from the last checkpoint",
                local=True,
            )
        wait = min(self.first_wait * 2 ** (self.faults - 1), LONGEST_WAIT)
        log.warning(
            f"WARNING: {self.name}: {where}: {reason}; try {self.faults} of {self.retries} "
            f"in {wait:g} s"
        )
        time.sleep(wait)

    def progress(self) -> None:
        """Note that something was read: the next fault is the first in a row again."""
        self.faults = 0


def is_passing(error: BaseException) -> bool:
    """Whether trying again may help: for faults of the network and the disk, not of the data."""
    causes = list(_causes(error))
    if any(isinstance(cause, LASTING) for cause in causes):
        return False
    return any(
        isinstance(cause, PASSING) or type(cause).__module__.partition(".")[0] in CLIENTS
        for cause in causes
    )


def told(error: BaseException) -> str:
    """Say in one line what is at the bottom of an error."""
    last = list(_causes(error))[-1]
    return " ".join(str(last).split()) or type(last).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
