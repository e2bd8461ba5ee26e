"""The cache of bases: what an edit of /sqshforge leaves unchanged, kept for the next pack.

A base is the squash file of an image without /sqshforge. Its content lies at the start of every
file that was made from it, so the cache keeps a hard link to the first such file, which costs no
space until that file is replaced, and beside it the base's own tables. Packed files are never
written to, only replaced; if another program changes one, the cache notices. When the cache exceeds
its limit, bases superseded by a newer one of the same image are removed first, then the least
recently used of the others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host import files
from sqshforge.host.files import (
    copy,
    link,
    publish,
    remove_leftovers,
)
from sqshforge.host.locks import exclusive, unless_held
from sqshforge.host.terminal import Reporter, size
from sqshforge.project import cache_home
from sqshforge.squashfs.hot_note import HotRange
from sqshforge.squashfs.superblock import LAYOUT, Tables

# All names in the folder: a base, the files beside it, partial files, the lock.
NAME = re.compile(r"\.?(?P<base>[^.].*?\.sqsh)(\.json|\.tables)?(\.\d+\.tmp|\.lock)?")


@dataclass(frozen=True)
class Base:
    """A kept base: a file that begins with the base's content, and the file's digests."""

    path: Path
    pieces: tuple[str, ...]
    start: int  # the offset of its tables, in bytes
    source: str
    hot: HotRange | None  # where its hot files lie
    size: int
    used: float  # the last use, seconds since 1970
    is_untouched: bool  # judged by its times


@dataclass(frozen=True)
class Cache:
    """A folder of bases; `limit` is how many bytes they may take."""

    folder: Path
    limit: int

    @classmethod
    def of_user(cls) -> Cache:
        """The user's own cache, with SQSHFORGE_CACHE_SIZE as its limit.

        Raises `RequestError` if that is not a size.
        """
        name = "SQSHFORGE_CACHE_SIZE"
        return cls(cache_home() / "bases", size(os.environ.get(name) or "50G", name))

    def has(self, key: str) -> bool:
        """Whether the cache has the base of a key at this moment."""
        return self._read(self._place(key)) is not None

    def take(self, key: str, target: Path, jobs: int) -> Base | None:
        """Write the base of a key to a new file; return None if there is no such base.

        A base that has changed since it was kept counts as missing. If its times do not show that
        it is unchanged, `jobs` threads read it and compare its digests.
        """
        base = self._read(self._place(key))
        if base is None:
            return None
        try:
            if not base.is_untouched and files.piece_digests(base.path, jobs) != list(base.pieces):
                return None
            tables = _tables(base.path).read_bytes()
            copy(base.path, target, base.start)
            with suppress(PermissionError):  # another user's, in a shared cache
                os.utime(_beside(base.path))
        except (FileNotFoundError, PermissionError):  # just pruned, or not readable by this user
            target.unlink(missing_ok=True)
            return None
        Tables(tables[: LAYOUT.size], base.start, tables[LAYOUT.size :]).put(target)
        return base

    def add(
        self,
        key: str,
        packed: Path,
        pieces: Sequence[str],
        tables: Tables,
        source: str,
        hot: HotRange | None = None,
    ) -> None:
        """Keep the base of a key, with which the file `packed` begins, then prune to the limit.

        `tables` are the base's, `pieces` the digests of the packed file. If the base cannot be
        kept, on a full disk for example, nothing of it stays.
        """
        place = self._place(key)
        try:
            self._write(place, packed, pieces, tables, source, hot)
        except BaseException:
            _forget(place)
            raise
        self.remove_orphans()
        self.prune(keep=place)

    def _write(
        self,
        place: Path,
        packed: Path,
        pieces: Sequence[str],
        tables: Tables,
        source: str,
        hot: HotRange | None,
    ) -> None:
        publish(tables.superblock + tables.rest, _tables(place))
        link(packed, place)
        found = place.stat()
        record = {
            "source": source,
            "start": tables.start,
            "hot": None if hot is None else asdict(hot),
            "size": found.st_size,
            "mtime_ns": found.st_mtime_ns,
            "ctime_ns": found.st_ctime_ns,
            "pieces": list(pieces),
        }
        publish(json.dumps(record).encode(), _beside(place))

    def keep(self, key: str) -> None:
        """Record the new ctime of a base that has just lost a hard link.

        The link was the packed file, which was replaced just now.
        """
        place = self._place(key)
        try:
            record, found = json.loads(_beside(place).read_text()), place.stat()
        except (FileNotFoundError, ValueError):  # it was pruned
            return
        if (found.st_size, found.st_mtime_ns) == (record["size"], record["mtime_ns"]):
            publish(json.dumps({**record, "ctime_ns": found.st_ctime_ns}).encode(), _beside(place))

    @contextmanager
    def alone(self, key: str, reporter: Reporter) -> Iterator[None]:
        """Hold a key's lock for the length of a block; remove its leftovers of killed packers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self._place(key)
        waiting = "waiting for another packer of the same base"
        with exclusive(_lock(place), waiting, reporter):
            remove_leftovers(place, ".json", ".tables")
            yield

    def bases(self) -> list[Base]:
        """All bases, most recently used first."""
        found = (self._read(path) for path in self.folder.glob("*.sqsh"))
        return sorted((one for one in found if one is not None), key=lambda one: -one.used)

    def prune(self, limit: int | None = None, keep: Path | None = None) -> list[Base]:
        """Remove superseded bases, then the least recently used, until the limit holds.

        `keep` is never removed. Returns the removed bases.
        """
        allowed = self.limit if limit is None else limit
        total, gone = 0, []
        for base in _by_worth(self.bases()):
            total += base.size
            if total > allowed and base.path != keep:
                total -= base.size
                gone.append(base)
                _forget(base.path)
        return gone

    def remove_orphans(self) -> list[int]:
        """Remove files of failed and killed packers that belong to no base; return their sizes.

        Files that a packer works on now stay.
        """
        gone: list[int] = []
        for place in self._orphans():
            with suppress(OSError, WorkError), unless_held(_lock(place)) as is_ours:
                for path in self._orphans().get(place, ()) if is_ours else ():
                    if path != _lock(place):  # `unless_held` removes it last
                        gone.append(path.lstat().st_size)
                        path.unlink()
        return gone

    def _orphans(self) -> dict[Path, list[Path]]:
        """Files that belong to no complete base, by the path of the base they were meant for."""
        found: dict[Path, list[Path]] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            match = NAME.fullmatch(path.name)
            if match is not None:
                place = self.folder / match["base"]
                if path not in _parts(place) or self._read(place) is None:
                    found.setdefault(place, []).append(path)
        return found

    def _place(self, key: str) -> Path:
        return self.folder / f"{key.removeprefix('sha256:')}.sqsh"

    def _read(self, path: Path) -> Base | None:
        try:
            facts = json.loads(_beside(path).read_text())
            found, used = path.stat(), _beside(path).stat().st_mtime
            if found.st_size != facts["size"]:
                return None
            times = (facts["mtime_ns"], facts["ctime_ns"])
            return Base(
                path=path,
                pieces=tuple(facts["pieces"]),
                start=facts["start"],
                source=facts["source"],
                hot=HotRange(**facts["hot"]) if facts.get("hot") else None,
                size=facts["size"],
                used=used,
                is_untouched=(found.st_mtime_ns, found.st_ctime_ns) == times,
            )
        except (OSError, ValueError, LookupError, TypeError):
            return None


def _by_worth(bases: Sequence[Base]) -> list[Base]:
    """The most recently used base of each image, then the bases that these superseded."""
    seen: set[str] = set()
    current: list[Base] = []
    superseded: list[Base] = []
    for base in bases:  # most recently used first
        (superseded if base.source in seen else current).append(base)
        seen.add(base.source)
    return current + superseded


def _parts(place: Path) -> tuple[Path, ...]:
    """The files of a base; without the first it does not count as one."""
    return _beside(place), _tables(place), place


def _forget(place: Path) -> None:
    for path in _parts(place):
        path.unlink(missing_ok=True)


def _lock(place: Path) -> Path:
    return place.with_name(f".{place.name}.lock")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _tables(path: Path) -> Path:
    return path.with_name(f"{path.name}.tables")
