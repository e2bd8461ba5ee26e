"""Write an image as a squash file: flat, with enroot's files, atomic, and only once.

Two ways lead to the same tree: a folder is squashed where it is mounted, a tar stream goes through
a filter into the squash tool. Neither puts a root file system on the disk. Either way the file is
written in two steps, first without /sqshforge, which may come from the cache of bases.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sqshforge import digest, dress, enroot, mksquashfs, superblock, tail
from sqshforge.cache import Cache
from sqshforge.disk import require_space
from sqshforge.enroot import CARRIED, ImageConfig
from sqshforge.errors import RequestError
from sqshforge.files import copy, partial, publish, remove_leftovers, sync
from sqshforge.lockfile import alone
from sqshforge.mksquashfs import Options, Squasher
from sqshforge.programs import Programs
from sqshforge.progress import Reporter
from sqshforge.source import Content, Folder, Source, overlay

__all__ = ["Options", "Packed", "content_key", "pack", "read_record"]

NEWEST = 2**32 - 1  # times in a squash file are 32 bits, without a sign
FORMAT = 2  # part of every key: raised when equal inputs come to give other bytes


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A squash file and the key of what it was made from."""

    path: Path
    size: int
    key: str
    seconds: float
    up_to_date: bool


def pack(
    source: Source,
    output: Path,
    options: Options,
    programs: Programs,
    reporter: Reporter,
    cache: Cache | None = None,
) -> Packed:
    """Pack a source; a no-op where the output already is what would come out.

    The file appears under its name whole or not at all, mode 0644, with its key beside it in
    FILE.json. Without a cache of bases every pack is a cold one. Raises `RequestError` for a
    source that is not there or an output that is not ours, `MissingError` for tools or disk
    space, `WorkError` where packing fails.
    """
    started = time.monotonic()
    program = programs.require("mksquashfs", "it writes the squash file")
    config = source.config()
    order = _Order(config, options, _epochs(config), mksquashfs.version(program, programs))
    output = output.absolute()
    if not output.parent.is_dir():
        raise RequestError("the output's folder does not exist", where=str(output.parent))
    lock = output.with_name(f".{output.name}.lock")
    with alone(lock, f"waiting for another packer of {output}", reporter):
        remove_leftovers(output)
        known = config.digest is not None and not options.force and _is(output, order)
        if not known:
            _may_replace(output, options)
            require_space(output.parent, max(config.size // 2, 1 << 20), f"packing {output.name}")
            for name in enroot.left_out(config):
                reporter.say(f"the variable {name} is left out: its value has a newline")
            _Pack(source, order, output, programs, reporter, cache).run()
    return Packed(
        path=output,
        size=output.stat().st_size,
        key=order.key,
        seconds=time.monotonic() - started,
        up_to_date=known,
    )


def content_key(config: ImageConfig, options: Options, epoch: int, tool: str) -> str:
    """A digest of all that the bytes of the file depend on.

    An image is its layers and what its config says of running it; under which name it was found,
    and in which store, does not matter.
    """
    facts = asdict(replace(config, size=0))
    if config.layers:
        facts = {**facts, "reference": "", "digest": ""}
    return _key({"config": facts, "epoch": epoch, **_of_tool(options, tool)})


@dataclass(frozen=True)
class _Order:
    """What is to be packed, and how; all that is known before the image is opened."""

    config: ImageConfig
    options: Options
    epochs: tuple[int, int]  # the newest time in the base, and in all of it
    tool: str

    @property
    def key(self) -> str:
        return content_key(self.config, self.options, self.epochs[1], self.tool)

    def base_key(self, layers: Sequence[str]) -> str:
        """The same of the base, which is made of these layers."""
        files = {name: data.decode("latin-1") for name, data in self.files.items()}
        facts = {"layers": list(layers), "files": files, "epoch": self.epochs[0]}
        return _key({**facts, **_of_tool(self.options, self.tool)})

    @property
    def files(self) -> dict[str, bytes]:
        return enroot.files(self.config)


@dataclass(frozen=True)
class _Made:
    """What was written: the digests of its pieces, and the key of the base below it."""

    pieces: Sequence[str]
    base: str | None = None


@dataclass(frozen=True)
class _Pack:
    """One squash file on its way."""

    source: Source
    order: _Order
    output: Path
    programs: Programs
    reporter: Reporter
    cache: Cache | None

    def run(self) -> None:
        """Write the file, then its record, and give them their names."""
        written = partial(self.output)
        work = partial(self.output, ".work")
        work.mkdir()
        try:
            with (
                self.source.open(self.order.config.digest) as content,
                self._opened(content, work) as opened,
            ):
                made = self._write(opened, written)
            written.chmod(0o644)
            sync(written)
            # Before the file: a record without its file is harmless, a file without looks not ours.
            _record(self.output, self.order, made, written)
            written.rename(self.output)
            sync(self.output.parent)
            _record(self.output, self.order, made, self.output)
        finally:
            written.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def _opened(self, content: Content, work: Path) -> Iterator[_Opened]:
        """The content as what can be squashed, and its /sqshforge as a folder that can be appended.

        Extended attributes cannot be carried over by an ordinary user, so with them none is.
        """
        mount, files = work / "mount", work / "files"
        mount.mkdir()
        files.mkdir()
        if isinstance(content, Folder):
            with overlay.mounted(content.stack, mount, self.programs) as stack:
                folder = stack.image / CARRIED
                found = folder if folder.is_dir() and not folder.is_symlink() else None
                yield _Opened(content, stack, None if self.order.options.xattrs else found)
        else:
            found = None if self.order.options.xattrs else tail.unpack(content, files)
            yield _Opened(content, None, found)

    def _write(self, opened: _Opened, written: Path) -> _Made:
        """Write the file."""
        order, jobs = self.order, self.order.options.jobs
        total = order.config.size or None
        with self.reporter.track(f"pack {self.output.name}", total=total) as tracker:
            squasher = Squasher(order.options, self.programs, tracker)
            base = None
            if opened.tail is not None and self.cache is not None:
                base = self._from_cache(opened, squasher, self.cache, written)
            if base is None:
                self._squash(opened, squasher, written)
            if opened.tail is None:
                return _Made(digest.pieces(written, jobs))
            # The append writes the superblock, in the first piece, and the tables at the end.
            unchanged = superblock.read(written).tables // digest.PIECE
            squasher.append(opened.tail, written, order.epochs[1])
            if base is None:
                return _Made(digest.pieces(written, jobs))
            return _Made(digest.pieces(written, jobs, ["", *base.pieces[1:unchanged]]), base.base)

    def _from_cache(
        self, opened: _Opened, squasher: Squasher, cache: Cache, written: Path
    ) -> _Made | None:
        """Copy the image without /sqshforge from the cache, made now where it is not there yet.

        None where nobody can tell which layers it is made of.
        """
        layers = base_layers(self.order.config.layers, opened.content)
        if layers is None:
            self.reporter.say("the image's layers cannot be seen: no base is kept of it")
            return None
        key = self.order.base_key(layers)
        with cache.alone(key, self.reporter):
            pieces = cache.take(key, written)
            if pieces is not None:
                self.reporter.say("all but /sqshforge comes from the cache of bases")
                return _Made(pieces, key)
            before = read_record(self.output)
            if before is not None and before.get("base") not in (None, key):
                self.reporter.say("the image has changed outside of /sqshforge: all is packed anew")
            needed = max(self.order.config.size // 2, 1 << 20)
            require_space(cache.folder, needed, "the cache of bases")
            fresh = cache.partial(key)
            self._squash(opened, squasher, fresh)
            sync(fresh)
            pieces = tuple(digest.pieces(fresh, self.order.options.jobs))
            copy(fresh, written)
            cache.add(key, fresh, pieces, self.order.config.reference)
        return _Made(pieces, key)

    def _squash(self, opened: _Opened, squasher: Squasher, written: Path) -> None:
        """Squash the image, without /sqshforge where that will be appended."""
        order, split = self.order, opened.tail is not None
        epoch = order.epochs[0 if split else 1]
        if opened.stack is not None:
            dress.fill(opened.stack.top, opened.stack.image, order.files, epoch)
            squasher.folder(opened.stack.merge(), written, epoch, split=split)
        else:
            assert not isinstance(opened.content, Folder)
            squasher.tar(opened.content, order.files, written, epoch, split=split)


@dataclass(frozen=True)
class _Opened:
    """An image's content while it is open: mounted (`stack`), or streams."""

    content: Content
    stack: overlay.Stack | None
    tail: Path | None


def base_layers(layers: Sequence[str], content: Content) -> tuple[str, ...] | None:
    """The layers without those on top that touch nothing but /sqshforge; None where unknown."""
    count = len(layers)
    while count:
        names = content.top_names(count - 1)
        if names is None:
            return None
        if not names <= {os.fsencode(CARRIED)}:
            break
        count -= 1
    return tuple(layers[:count]) or None


def _key(facts: dict[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _of_tool(options: Options, tool: str) -> dict[str, Any]:
    return {
        "level": options.level,
        "block": options.block,
        "xattrs": options.xattrs,
        "tool": tool,
    }


def _epochs(config: ImageConfig) -> tuple[int, int]:
    """SOURCE_DATE_EPOCH, else the creation time, of the base and of the image."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None:
        created = config.created
        return created if config.base_created is None else config.base_created, created
    if not (text.isascii() and text.isdigit() and int(text) <= NEWEST):
        raise RequestError(
            f"SOURCE_DATE_EPOCH is {text!r}", mend="seconds since 1970, or leave it unset"
        )
    return int(text), int(text)


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.name}.json")


def _record(output: Path, order: _Order, made: _Made, written: Path) -> None:
    """Put beside the output what it is, and the times by which a change is noticed."""
    config, found = order.config, written.stat()
    facts = {
        "key": order.key,
        "source": config.reference,
        "image": config.digest,
        "layers": config.layers,
        "config": {
            name: value
            for name, value in asdict(config).items()
            if name not in ("digest", "layers", "size", "base_created")
        },
        "options": {**_of_tool(order.options, order.tool), "epochs": order.epochs},
        "base": made.base,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "digest": digest.whole(made.pieces),
    }
    publish((json.dumps(facts, indent=2) + "\n").encode(), _beside(output))


def read_record(output: Path) -> dict[str, Any] | None:
    """What is noted beside a squash file; None where there is nothing of ours."""
    try:
        facts = json.loads(_beside(output).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= {"key", "size"} else None


def _is(output: Path, order: _Order) -> bool:
    """Whether the output is the file that would come out, untouched since it was written."""
    facts = read_record(output)
    if facts is None or facts["key"] != order.key or not output.is_file():
        return False
    found = output.stat()
    if found.st_size != facts["size"]:
        return False
    # Reading a file of many gigabytes takes long; its times tell whether that is called for.
    if (found.st_mtime_ns, found.st_ctime_ns) == (facts.get("mtime_ns"), facts.get("ctime_ns")):
        return True
    return digest.of(output, order.options.jobs) == facts.get("digest")


def _may_replace(output: Path, options: Options) -> None:
    if output.is_dir():
        raise RequestError("the output is a folder", where=str(output), mend="name a file")
    if os.path.lexists(output) and read_record(output) is None and not options.force:
        raise RequestError(
            "the output exists and was not made by sqshforge",
            where=str(output),
            mend="add --force to replace it, or name another output",
        )
