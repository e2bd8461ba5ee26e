"""Write an image as a squash file: flat, with enroot's files, atomic, and only once.

Two ways lead to the same tree: folders are squashed where they are mounted, a tar stream goes
through a filter into the squash tool. Neither puts a root file system on the disk.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.host.files import exclusive, partial, remove_leftovers, sync
from sqshforge.host.programs import Programs
from sqshforge.host.resources import require_space
from sqshforge.host.terminal import Reporter
from sqshforge.image import enroot
from sqshforge.image.address import Source
from sqshforge.squash import assemble, mksquashfs, request
from sqshforge.squash.cache import Cache
from sqshforge.squash.mksquashfs import Options, Squasher
from sqshforge.squash.order import Order

__all__ = ["Options", "Packed", "pack"]

LONGEST = 220  # bytes of a name, of the 255 that there are: what is beside it has longer ones


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
    order = Order.of(config, options, mksquashfs.version(program, programs))
    output = output.absolute()
    if len(os.fsencode(output.name)) > LONGEST:
        raise RequestError(
            "the output's name is too long",
            where=str(output),
            mend=f"give it at most {LONGEST} bytes: its record's name is longer",
        )
    if not output.parent.is_dir():
        raise RequestError("the output's folder does not exist", where=str(output.parent))
    lock = output.with_name(f".{output.name}.lock")
    with exclusive(lock, f"waiting for another packer of {output}", reporter):
        remove_leftovers(output)
        known = config.digest is not None and not options.force and request.fits(output, order)
        if not known:
            _may_replace(output, options)
            # Compressed it takes a third or so; what it takes is not known before.
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


@dataclass(frozen=True)
class _Pack:
    """One squash file on its way."""

    source: Source
    order: Order
    output: Path
    programs: Programs
    reporter: Reporter
    cache: Cache | None

    def run(self) -> None:
        """Write the file and its record, and give them their names."""
        written, work = partial(self.output), partial(self.output, ".work")
        work.mkdir()
        try:
            with ThreadPoolExecutor(1) as side, ExitStack() as held:
                with (
                    self.source.open(self.order.config.digest) as content,
                    assemble.opened(content, self.order, work, self.programs) as image,
                ):
                    base = self._base(image, held)
                    made = self._write(image, written, base, side)
                # Only now: at its end a source tells that the image went away meanwhile.
                self._publish(written, made, base)
        finally:
            written.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)

    def _base(self, image: assemble.Opened, held: ExitStack) -> str | None:
        """The key of the image's base, whose lock is `held`; None where none is kept."""
        if self.cache is None or image.tail is None:
            return None
        layers = assemble.base_layers(self.order, image.content)
        if layers is None:
            self.reporter.say("the image's layers cannot be seen: no base is kept of it")
            return None
        key = self.order.base_key(layers)
        try:
            held.enter_context(self.cache.alone(key, self.reporter))
        except OSError as error:
            self._without_base(error)
            return None
        return key

    def _without_base(self, error: OSError) -> None:
        where = error.filename or (self.cache and self.cache.folder)
        self.reporter.say(f"no base is kept for the next pack: {where}: {error.strerror}")

    def _write(
        self, image: assemble.Opened, written: Path, base: str | None, side: Executor
    ) -> assemble.Written:
        total = self.order.config.size or None
        with self.reporter.track(f"pack {self.output.name}", total=total) as tracker:
            squasher = Squasher(self.order.options, self.programs, tracker)
            if base is not None and self.cache is not None:
                made = assemble.edited(image, self.order, squasher, written, side, base, self.cache)
                if made is not None:
                    self.reporter.say("all but /sqshforge comes from the cache of bases")
                    return made
                before = request.read(self.output)
                if before is not None and before.get("base") not in (None, base):
                    self.reporter.say(
                        "the image has changed outside of /sqshforge: all is packed anew"
                    )
            return assemble.whole(image, self.order, squasher, written, side)

    def _publish(self, written: Path, made: assemble.Written, base: str | None) -> None:
        order, output = self.order, self.output
        pieces = made.settled.result()
        written.chmod(0o644)
        sync(written)
        # Before the file: a record without its file is harmless, a file without looks not ours.
        request.write(output, order, base, pieces, written)
        written.rename(output)
        sync(output.parent)
        if base is not None and self.cache is not None:
            try:
                if made.base is not None:
                    self.cache.add(base, output, pieces, made.base, order.config.reference)
                else:
                    self.cache.keep(base)
            except OSError as error:
                self._without_base(error)
        request.write(output, order, base, pieces, output)


def _may_replace(output: Path, options: Options) -> None:
    if output.is_dir():
        raise RequestError("the output is a folder", where=str(output), mend="name a file")
    if os.path.lexists(output) and request.read(output) is None and not options.force:
        raise RequestError(
            "the output exists and was not made by sqshforge",
            where=str(output),
            mend="add --force to replace it, or name another output",
        )
