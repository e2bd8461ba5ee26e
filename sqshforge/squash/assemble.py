"""An image's squash file in two steps: all but /sqshforge, then /sqshforge.

The first step takes the time. What it gives depends on nothing in /sqshforge, and the cache of
bases has it for the next pack; a cold pack goes the same two steps, and so gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqshforge.host.files import PIECE, piece_digests, piece_digests_at, sync
from sqshforge.host.programs import Programs
from sqshforge.image import overlay
from sqshforge.image.address import Content, Folder
from sqshforge.image.enroot import CARRIED
from sqshforge.squash import enroot_layer
from sqshforge.squash import payload as tail
from sqshforge.squash.cache import Base, Cache
from sqshforge.squash.mksquashfs import Squasher
from sqshforge.squash.order import Order
from sqshforge.squashfs.superblock import Tables

Result = TypeVar("Result")


@dataclass(frozen=True)
class Opened:
    """An image's content while it is open: mounted (`stack`), or streams.

    `tail` is its /sqshforge where that can be appended, else None.
    """

    content: Content
    stack: overlay.Stack | None
    tail: Path | None


@dataclass(frozen=True)
class Written:
    """A file that was written, and the tables of its base where that is new.

    When `settled` is done the file is on the disk, and these are the digests of its pieces: the
    source can be let go meanwhile.
    """

    settled: Future[list[str]]
    base: Tables | None = None


@contextmanager
def opened(content: Content, order: Order, work: Path, programs: Programs) -> Iterator[Opened]:
    """Mount an image's content, or unpack the little of it that has to be, below `work`.

    Extended attributes cannot be carried over by an ordinary user: with them, nothing is
    appended.
    """
    mount, files = work / "mount", work / "files"
    mount.mkdir()
    files.mkdir()
    if isinstance(content, Folder):
        with content.mounted(mount, programs) as stack:
            folder = stack.image / CARRIED
            found = folder if folder.is_dir() and not folder.is_symlink() else None
            yield Opened(content, stack, None if order.options.xattrs else found)
    else:
        unpacked = None if order.options.xattrs else tail.unpack(content, files)
        yield Opened(content, None, unpacked)


def base_layers(order: Order, content: Content) -> tuple[str, ...] | None:
    """The layers without those on top that touch nothing but /sqshforge; None where unknown."""
    layers = order.config.layers
    count = len(layers)
    while count:
        names = content.top_names(count - 1)
        if names is None:
            return None
        if not names <= {os.fsencode(CARRIED)}:
            break
        count -= 1
    return layers[:count] or None


def whole(image: Opened, order: Order, squasher: Squasher, target: Path, side: Executor) -> Written:
    """Write an image from nothing; `side` does what need not be waited for."""
    split = image.tail is not None
    epoch = order.base_epoch if split else order.epoch
    if image.stack is not None:
        enroot_layer.fill(image.stack.top, image.stack.image, order.files, epoch)
        squasher.folder(image.stack.merge(), target, epoch, split=split)
        image.stack.unmerge()
    else:
        assert not isinstance(image.content, Folder)
        squasher.tar(image.content, order.files, target, epoch, split=split)
    jobs = order.options.jobs
    if image.tail is None:
        return Written(side.submit(_settle, target, jobs, {}))
    tables = Tables.of(target)
    kept = side.submit(_settle_base, target, jobs, tables.start)
    squasher.append(image.tail, target, order.epoch)
    return Written(side.submit(_settle, target, jobs, kept.result()), tables)


def edited(
    image: Opened,
    order: Order,
    squasher: Squasher,
    target: Path,
    side: Executor,
    key: str,
    cache: Cache,
) -> Written | None:
    """Write an image whose base the cache has; None where it has not."""
    base: Base | None = cache.take(key, target, order.options.jobs)
    if base is None or image.tail is None:
        return None
    squasher.append(image.tail, target, order.epoch)
    known = {index: base.pieces[index] for index in _kept(base.start)}
    return Written(side.submit(_settle, target, order.options.jobs, known))


def _kept(start: int) -> range:
    """The pieces that an append leaves as they are, of a file whose tables begin at `start`.

    It writes the superblock, in the first piece, and the tables.
    """
    return range(1, start // PIECE)


def _settle_base(target: Path, jobs: int, start: int) -> dict[int, str]:
    return _synced(target, lambda: piece_digests_at(target, _kept(start), jobs))


def _settle(target: Path, jobs: int, known: Mapping[int, str]) -> list[str]:
    return _synced(target, lambda: piece_digests(target, jobs, known))


def _synced(target: Path, work: Callable[[], Result]) -> Result:
    """What some work gives that is done while a file is seen safely on the disk."""
    with ThreadPoolExecutor(1) as disk:
        synced = disk.submit(sync, target)
        found = work()
        synced.result()
    return found
