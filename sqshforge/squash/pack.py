"""Write an image as a squash file: flattened, with enroot's files, atomically, and only once.

A mounted image and an archive reach mksquashfs as the same tar. Neither way writes a root file
system to the disk.

A file is written in two steps: everything except /sqshforge, then /sqshforge. The first step takes
most of the time. Its result depends on nothing in /sqshforge, and the cache of bases keeps it for
the next pack; a cold pack takes the same two steps and so gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError, WorkError
from sqshforge.host import rootless
from sqshforge.host.files import (
    partial,
    remove_leftovers,
    sync,
)
from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.resources import FullDisk, require_space
from sqshforge.host.terminal import Reporter
from sqshforge.image import address, enroot
from sqshforge.image.address import Content, Remote, Rootfs, Source
from sqshforge.image.enroot import CARRIED
from sqshforge.squash import mksquashfs, payload
from sqshforge.squash.cache import Cache
from sqshforge.squash.content import Opened, base_layers, open_content, payload_layers
from sqshforge.squash.mksquashfs import Options, Squasher
from sqshforge.squash.request import (
    PackRequest,
    fitting,
    read_record,
    record_path,
    stale_signature,
    write_record,
)
from sqshforge.squash.write import Written, pack_edited, pack_whole

__all__ = ["Options", "Packed", "pack", "pack_address"]

LONGEST = 220  # bytes of a name, of the 255 allowed: the files beside it have longer names


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A squash file and its content key."""

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
    """Pack a source; do nothing if the output is already the file that it would give.

    The file appears under its name whole or not at all, mode 0644, with its key beside it in
    FILE.json. Without a cache of bases every pack is a cold one. Raises `RequestError` for a
    source that does not exist or an output that sqshforge did not make, `MissingError` for missing
    tools or disk space, `WorkError` if packing fails.
    """
    started = time.monotonic()
    program = programs.require("mksquashfs", "it writes the squash file")
    config = source.config()
    request = PackRequest.of(config, options, mksquashfs.version(program, programs))
    output = output.absolute()
    if len(os.fsencode(output.name)) > LONGEST:
        raise RequestError(
            "the output's name is too long",
            where=str(output),
            fix=f"give it at most {LONGEST} bytes: its record's name is longer",
        )
    if isinstance(source, Rootfs) and source.holds(output):
        raise RequestError(
            "the output lies in the folder that is packed, and would be packed into itself",
            where=str(output),
            fix=f"name a file outside of {source.folder.resolve()}",
        )
    if not output.parent.is_dir():
        raise RequestError("the output's folder does not exist", where=str(output.parent))
    lock = output.with_name(f".{output.name}.lock")
    with exclusive(lock, f"waiting for another packer of {output}", reporter):
        remove_leftovers(output, ".json", ".sig")
        known = None if config.digest is None or options.force else fitting(output, request)
        if known is None:
            _may_replace(output, options)
            # The compressed size is not known in advance; it is about a third.
            require_space(output.parent, max(config.size // 2, 1 << 20), f"packing {output.name}")
            for name in enroot.left_out(config):
                reporter.say(f"the variable {name} is left out: it has a control character")
            _Pack(source, request, output, programs, reporter, cache).run()
    return Packed(
        path=output,
        size=output.stat().st_size,
        key=known or request.key,
        seconds=time.monotonic() - started,
        up_to_date=known is not None,
    )


def pack_address(
    text: str,
    output: Path,
    options: Options,
    programs: Programs,
    reporter: Reporter,
    cache: Cache | None = None,
) -> Packed:
    """Pack the image at an address, as root or as an ordinary user.

    Raises what `pack` and `rootless.call_as_root` raise.
    """

    def work() -> Packed:
        return pack(
            address.parse(text, programs, reporter), output, options, programs, reporter, cache
        )

    return rootless.call_as_root(work, text, programs)


@dataclass(frozen=True)
class _Pack:
    """One squash file that is being packed."""

    source: Source
    request: PackRequest
    output: Path
    programs: Programs
    reporter: Reporter
    cache: Cache | None

    def run(self) -> None:
        """Write the file and its record, then move them to their final names."""
        written, work = partial(self.output), partial(self.output, ".work")
        full: FullDisk | None = None
        try:
            self._make(written, work)
        except (OSError, WorkError) as error:
            full = FullDisk.of(error, self.output.parent)
            if full is None:
                raise
        finally:
            written.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
        if full is not None:
            raise full.missing(self.request.config.size, f"packing {self.output.name}")

    def _make(self, written: Path, work: Path) -> None:
        work.mkdir()
        with ThreadPoolExecutor(1) as side, ExitStack() as held:
            with self.source.open(self.request.config.digest) as content:
                made, base = self._made(content, work, written, side, held)
            # Not earlier: on closing, a source raises if the image was removed meanwhile.
            self._publish(written, made, base)

    def _made(
        self, content: Content, work: Path, written: Path, side: Executor, held: ExitStack
    ) -> tuple[Written, str | None]:
        """Write the file; return it and the key of its base, whose lock goes into `held`."""
        if isinstance(content, Remote):
            found = self._unfetched(content, work, written, side, held)
            if found is not None:
                return found
            with content.fetched(work) as stream:
                return self._made(stream, work, written, side, held)
        with open_content(content, self.request, work, self.programs) as image:
            base = self._base(image, held)
            return self._write(image, written, base, side), base

    def _unfetched(
        self, content: Remote, work: Path, written: Path, side: Executor, held: ExitStack
    ) -> tuple[Written, str] | None:
        """Write the file from a cached base, without reading the layers; None if that fails.

        Only the image's history, and the record of the file that is replaced, say which base it
        has. So the base is looked up but never added: a base that does not match its key would
        corrupt other images.
        """
        layers = content.claimed_base()
        seen = payload_layers(self.request, read_record(self.output))
        while layers and layers[-1] in seen:
            layers = layers[:-1]
        if self.cache is None or self.request.options.xattrs or not layers:
            return None
        key = self.request.base_key(layers)
        if not self.cache.has(key):
            return None
        folder = work / "alone"
        folder.mkdir()
        try:
            unpacked = payload.unpack(content, folder)
        except WorkError as error:
            self.reporter.say(f"/{CARRIED} alone cannot be had: {error.what}")
            return None
        if unpacked is None:
            return None
        with ExitStack() as locked:
            if not self._lock(key, locked):
                return None
            with self._tracked() as squasher:
                made = self._edited(unpacked, written, side, key, squasher)
            if made is None:
                return None
            held.enter_context(locked.pop_all())
        return made, key

    def _base(self, image: Opened, held: ExitStack) -> str | None:
        """The key of the image's base, whose lock goes into `held`; None if no base is kept."""
        if self.cache is None or image.payload is None:
            return None
        layers = base_layers(self.request, image.content)
        if layers is None:
            self.reporter.say("the image's layers cannot be seen: no base is kept of it")
            return None
        key = self.request.base_key(layers)
        return key if self._lock(key, held) else None

    def _lock(self, key: str, held: ExitStack) -> bool:
        assert self.cache is not None
        try:
            held.enter_context(self.cache.alone(key, self.reporter))
        except (OSError, WorkError) as error:
            self._without_base(error)
            return False
        return True

    def _without_base(self, error: OSError | WorkError) -> None:
        why = error.what if isinstance(error, WorkError) else error.strerror
        named = error.where if isinstance(error, WorkError) else error.filename
        where = named or (self.cache and self.cache.folder)
        self.reporter.say(f"no base is kept for the next pack: {where}: {why}")

    @contextmanager
    def _tracked(self) -> Iterator[Squasher]:
        total = self.request.config.size or None
        with self.reporter.track(f"pack {self.output.name}", total=total) as tracker:
            yield Squasher(self.request.options, self.programs, tracker)

    def _write(self, image: Opened, written: Path, base: str | None, side: Executor) -> Written:
        with self._tracked() as squasher:
            if base is not None and image.payload is not None:
                made = self._edited(image.payload, written, side, base, squasher)
                if made is not None:
                    return made
                before = read_record(self.output)
                if before is not None and before.get("base") not in (None, base):
                    self.reporter.say(
                        "the image has changed outside of /sqshforge: all is packed anew"
                    )
            return pack_whole(image, self.request, squasher, written, side)

    def _edited(
        self, unpacked: Path, written: Path, side: Executor, base: str, squasher: Squasher
    ) -> Written | None:
        assert self.cache is not None
        made = pack_edited(unpacked, self.request, squasher, written, side, base, self.cache)
        if made is not None:
            self.reporter.say("all but /sqshforge comes from the cache of bases")
        return made

    def _publish(self, written: Path, made: Written, base: str | None) -> None:
        request, output = self.request, self.output
        pieces = made.settled.result()
        if request.hot.lines and made.hot is None:
            self.reporter.say(
                "warning: no line of the list of hot files names a file of this image, so it is "
                "packed as without a list"
            )
            self.reporter.say("  fix:   sqshforge trace writes a list of it")
        written.chmod(0o644)
        sync(written)
        # Before the file: a record without its file is harmless, but a file without its record
        # looks as if another program made it.
        write_record(output, request, base, pieces, written, made.hot)
        signature = stale_signature(output, request, pieces)
        if signature is not None:
            signature.unlink()
            self.reporter.say(
                f"{signature.name} is removed: it is of another file than {output.name} is now"
            )
        written.rename(output)
        sync(output.parent)
        if base is not None and self.cache is not None:
            try:
                if made.base is not None:
                    reference = request.config.reference
                    self.cache.add(base, output, pieces, made.base, reference, made.hot)
                else:
                    self.cache.keep(base)
            except OSError as error:
                self._without_base(error)
        write_record(output, request, base, pieces, output, made.hot)


def _may_replace(output: Path, options: Options) -> None:
    if output.is_dir():
        raise RequestError("the output is a folder", where=str(output), fix="name a file")
    record = record_path(output)
    if record.is_dir():
        raise RequestError(
            "a folder has the name of the output's record",
            where=str(record),
            fix="name another output, or rename the folder",
        )
    if os.path.lexists(output) and read_record(output) is None and not options.force:
        raise RequestError(
            "the output exists and was not made by sqshforge",
            where=str(output),
            fix="add --force to replace it, or name another output",
        )
