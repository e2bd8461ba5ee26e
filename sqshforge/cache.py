"""Packed images without their /sqshforge, kept so that a change of that needs no other work.

Each base is a squash file named by its key, with a record of its pieces' digests beside it. The
least recently used go first where the cache grows over its limit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.files import copy, partial, publish, remove_leftovers
from sqshforge.lockfile import alone
from sqshforge.progress import Reporter

LIMIT = 50 << 30  # bytes
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Base:
    """A kept base: the file, the digests of its pieces, and when it was last used."""

    path: Path
    pieces: tuple[str, ...]
    source: str
    size: int
    used: float  # seconds of the epoch


@dataclass(frozen=True)
class Cache:
    """A folder of bases, and the bytes that they may take."""

    folder: Path
    limit: int = LIMIT

    @classmethod
    def of_user(cls) -> Cache:
        """The user's own: SQSHFORGE_CACHE, else below XDG_CACHE_HOME or ~/.cache.

        SQSHFORGE_CACHE_SIZE is its limit. Raises `RequestError` for one that is no size.
        """
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = os.environ.get("SQSHFORGE_CACHE") or Path(home) / "sqshforge"
        return cls(Path(folder) / "bases", size(os.environ.get("SQSHFORGE_CACHE_SIZE") or "50G"))

    def take(self, key: str, target: Path) -> tuple[str, ...] | None:
        """Copy the base of a key; the digests of its pieces, or None where there is no such base.

        A base that is not what was written is none.
        """
        base = self._read(self._place(key))
        if base is None:
            return None
        try:
            copy(base.path, target)
            os.utime(_beside(base.path))
        except FileNotFoundError:  # it was pruned at this moment
            return None
        return base.pieces

    def partial(self, key: str) -> Path:
        """Where a base is written before it is added."""
        return partial(self._place(key))

    def add(self, key: str, written: Path, pieces: Sequence[str], source: str) -> None:
        """Take over a file of `partial` as the base of a key, then keep to the limit."""
        place = self._place(key)
        found = written.stat()
        record = {
            "source": source,
            "size": found.st_size,
            "mtime_ns": found.st_mtime_ns,
            "pieces": list(pieces),
        }
        publish(json.dumps(record).encode(), _beside(place))
        written.rename(place)
        self.prune(keep=place)

    @contextmanager
    def alone(self, key: str, reporter: Reporter) -> Iterator[None]:
        """Hold a key for the length of a block, and clear up what killed packers left of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self._place(key)
        waiting = "waiting for another packer of the same base"
        with alone(place.with_name(f".{place.name}.lock"), waiting, reporter):
            remove_leftovers(place)
            yield

    def bases(self) -> list[Base]:
        """All bases, the last used first."""
        found = (self._read(path) for path in self.folder.glob("*.sqsh"))
        return sorted((one for one in found if one is not None), key=lambda one: -one.used)

    def prune(self, limit: int | None = None, keep: Path | None = None) -> list[Base]:
        """Remove the least recently used bases until the limit holds; those that went."""
        allowed = self.limit if limit is None else limit
        total, gone = 0, []
        for base in self.bases():
            total += base.size
            if total > allowed and base.path != keep:
                total -= base.size
                gone.append(base)
                _beside(base.path).unlink(missing_ok=True)
                base.path.unlink(missing_ok=True)
        return gone

    def _place(self, key: str) -> Path:
        return self.folder / f"{key.removeprefix('sha256:')}.sqsh"

    def _read(self, path: Path) -> Base | None:
        try:
            facts = json.loads(_beside(path).read_text())
            found, used = path.stat(), _beside(path).stat().st_mtime
            if (found.st_size, found.st_mtime_ns) != (facts["size"], facts["mtime_ns"]):
                return None
            return Base(path, tuple(facts["pieces"]), facts["source"], facts["size"], used)
        except (OSError, ValueError, LookupError, TypeError):
            return None


def size(text: str) -> int:
    """Bytes of a size such as 50G or 512M; `RequestError` for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise RequestError(f"{text!r} is no size", mend="a number of bytes, or 512M, 50G, 1T")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
