"""The folder in a node's memory where ranks keep copies of checkpoints, made by their agent.

training.launch outlives the ranks that it restarts in place, so it makes the folder, gives them its
name in CHECKPOINT_MEMORY, and removes it at its end. While it runs it holds a lock on the folder. A
folder that nobody holds was left by a killed job, and is removed when the next job of the same user
starts there. Light: no torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from training.checkpoint.free_memory import is_tmpfs, roomiest

VARIABLE = "CHECKPOINT_MEMORY"
"""Gives the ranks the folder's name; empty: there is no writable tmpfs."""
STARTS = "RANKS_STARTS"
"""How often the agent of this node has started its ranks; torchrun does not count lost nodes."""
PREFIX = "sqshforge-checkpoint-"


def places(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a tmpfs is looked for; of several, the one with the most room is used."""
    return (Path("/dev/shm"), Path(environment.get("TMPDIR") or "/tmp"))


class MemoryFolder:
    """The folder of one start of a job on this node. Never raises: without it, disks are read."""

    def __init__(
        self,
        run_id: str,
        environment: MutableMapping[str, str],
        places: Sequence[Path],
        *,
        wanted: bool = True,
    ) -> None:
        """Note what to make. environment: the ranks'. wanted: if False, only remove leftovers."""
        self._name, self._environment, self._wanted = f"{PREFIX}{run_id}-", environment, wanted
        self._places, self._lock, self._maker = places, -1, os.getpid()
        self.path: Path | None = None

    def make(self) -> None:
        """Remove what killed jobs have left, and make the folder, unless it has been made."""
        if self.path is not None:
            return
        usable = [one for one in self._places if is_tmpfs(one) and os.access(one, os.W_OK)]
        for place in usable:
            for left in leftovers(place):
                shutil.rmtree(left, ignore_errors=True)
        if self._wanted:
            with suppress(OSError):
                self.path = self._made(roomiest(usable)) if usable else None
            self._environment[VARIABLE] = str(self.path or "")

    def remove(self) -> None:
        """Remove the folder and its contents if this process made it. May be called again."""
        if self.path is None or os.getpid() != self._maker:
            return
        self._environment.pop(VARIABLE, None)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self.path = None

    def _made(self, place: Path) -> Path:
        # Locked before it has the name by which others would take it for a leftover.
        hidden = Path(tempfile.mkdtemp(prefix=f".{self._name}", dir=place))  # with mode 0700
        try:
            self._lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return hidden.rename(place / hidden.name[1:])
        except OSError:
            hidden.rmdir()
            raise


def leftovers(place: Path) -> Iterator[Path]:
    """Find this user's folders in a place that no agent holds any more."""
    for path in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(folder).st_uid == os.geteuid():
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield path
            finally:
                os.close(folder)
