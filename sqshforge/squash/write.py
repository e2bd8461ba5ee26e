"""Write one squash file: whole, or from the cached base of an image and its new /sqshforge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqshforge.host.files import PIECE, piece_digests, piece_digests_at, sync
from sqshforge.image.address import Folder
from sqshforge.squash import enroot_layer
from sqshforge.squash.cache import Base, Cache
from sqshforge.squash.content import Opened
from sqshforge.squash.mksquashfs import Squasher
from sqshforge.squash.request import PackRequest
from sqshforge.squashfs.hot_note import HotRange
from sqshforge.squashfs.hot_range import locate, note
from sqshforge.squashfs.superblock import Tables

Result = TypeVar("Result")


@dataclass(frozen=True)
class Written:
    """A written file, and the tables of its base if that is new.

    When `settled` is done, the file is safely on the disk, and the result is the digests of its
    pieces. The source is not needed for that and can be closed before.
    """

    settled: Future[list[str]]
    base: Tables | None = None
    hot: HotRange | None = None  # where its hot files lie


def pack_whole(
    image: Opened, request: PackRequest, squasher: Squasher, target: Path, side: Executor
) -> Written:
    """Write an image from scratch; `side` runs the work that need not be waited for."""
    split = image.payload is not None
    epoch = request.base_epoch if split else request.epoch
    files: list[bytes] = []  # the hot ones
    if image.stack is not None:
        xattrs = request.options.xattrs
        enroot_layer.fill(image.stack.top, image.stack.image, request.files, epoch, xattrs=xattrs)
        if xattrs:
            squasher.folder(image.stack.merge(), target, epoch)
            image.stack.unmerge()
        else:
            files = squasher.stack(image.stack, target, epoch, request.hot, split=split)
    else:
        assert not isinstance(image.content, Folder)
        files = squasher.tar(image.content, request.files, target, epoch, request.hot, split=split)
    jobs = request.options.jobs
    hot = locate(target, files)
    if image.payload is None:
        _note(target, hot)
        return Written(side.submit(_settle, target, jobs, {}), hot=hot)
    tables = Tables.of(target)
    kept = side.submit(_settle_base, target, jobs, tables.start)
    squasher.append(image.payload, target, request.epoch)
    _note(target, hot)
    return Written(side.submit(_settle, target, jobs, kept.result()), tables, hot)


def pack_edited(
    unpacked: Path,
    request: PackRequest,
    squasher: Squasher,
    target: Path,
    side: Executor,
    key: str,
    cache: Cache,
) -> Written | None:
    """Write an image from its /sqshforge and its cached base; return None if none is cached."""
    base: Base | None = cache.take(key, target, request.options.jobs)
    if base is None:
        return None
    squasher.append(unpacked, target, request.epoch)
    _note(target, base.hot)
    known = {index: base.pieces[index] for index in _kept(base.start)}
    return Written(side.submit(_settle, target, request.options.jobs, known), hot=base.hot)


def _note(target: Path, hot: HotRange | None) -> None:
    if hot is not None:
        note(target, hot)


def _kept(start: int) -> range:
    """The pieces that an append does not change, of a file whose tables begin at byte `start`.

    An append writes the superblock, in the first piece, and the tables.
    """
    return range(1, start // PIECE)


def _settle_base(target: Path, jobs: int, start: int) -> dict[int, str]:
    return _synced(target, lambda: piece_digests_at(target, _kept(start), jobs))


def _settle(target: Path, jobs: int, known: Mapping[int, str]) -> list[str]:
    return _synced(target, lambda: piece_digests(target, jobs, known))


def _synced(target: Path, work: Callable[[], Result]) -> Result:
    """Sync a file to the disk while `work` runs; return the result of `work`."""
    with ThreadPoolExecutor(1) as disk:
        synced = disk.submit(sync, target)
        found = work()
        synced.result()
    return found
