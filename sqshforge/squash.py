"""Write an image as a squash file: flat, with enroot's files, atomic, and only once.

Two ways lead to the same tree: a mounted folder is squashed in place, a tar stream goes through
a filter into the squash tool. Neither puts a root file system on the disk.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqshforge import enroot, mksquashfs
from sqshforge.disk import require_space
from sqshforge.enroot import ImageConfig
from sqshforge.errors import RequestError
from sqshforge.lockfile import alone
from sqshforge.machine import sha256
from sqshforge.mksquashfs import Options
from sqshforge.programs import Programs
from sqshforge.progress import Reporter
from sqshforge.source import Folder, Source

__all__ = ["Options", "Packed", "content_key", "pack", "read_record"]

NEWEST = 2**32 - 1  # times in a squash file are 32 bits, without a sign
FORMAT = 1  # part of every key: raised when equal inputs come to give other bytes


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A squash file and the key of what it was made from."""

    path: Path
    size: int
    key: str
    seconds: float
    up_to_date: bool


def pack(
    source: Source, output: Path, options: Options, programs: Programs, reporter: Reporter
) -> Packed:
    """Pack a source; a no-op where the output already is what would come out.

    The file appears under its name whole or not at all, mode 0644, with its key beside it in
    FILE.json. Raises `RequestError` for a source that is not there or an output that is not
    ours, `MissingError` for tools or disk space, `WorkError` where packing fails.
    """
    started = time.monotonic()
    program = programs.require("mksquashfs", "it writes the squash file")
    config = source.config()
    epoch = _epoch(config)
    key = content_key(config, options, epoch, mksquashfs.version(program, programs))
    output = output.absolute()
    if not output.parent.is_dir():
        raise RequestError("the output's folder does not exist", where=str(output.parent))
    lock = output.with_name(f".{output.name}.lock")
    with alone(lock, f"waiting for another packer of {output}", reporter):
        _remove_leftovers(output)
        known = config.digest is not None and not options.force and _is(output, key)
        if not known:
            _may_replace(output, options)
            require_space(output.parent, max(config.size, 1 << 20), f"packing {output.name}")
            _write(source, config, output, options, epoch, key, programs, reporter)
    return Packed(
        path=output,
        size=output.stat().st_size,
        key=key,
        seconds=time.monotonic() - started,
        up_to_date=known,
    )


def content_key(config: ImageConfig, options: Options, epoch: int, tool: str) -> str:
    """A digest of all that the bytes of the file depend on."""
    facts = {
        "format": FORMAT,
        "config": {name: value for name, value in asdict(config).items() if name != "size"},
        "level": options.level,
        "block": options.block,
        "epoch": epoch,
        "tool": tool,
    }
    return f"sha256:{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}"


def _write(
    source: Source,
    config: ImageConfig,
    output: Path,
    options: Options,
    epoch: int,
    key: str,
    programs: Programs,
    reporter: Reporter,
) -> None:
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    files = enroot.files(config)
    try:
        with (
            source.open(config.digest) as content,
            reporter.track(f"pack {output.name}", total=config.size or None) as tracker,
        ):
            if isinstance(content, Folder):
                mksquashfs.from_folder(content, files, partial, options, epoch, programs, tracker)
            else:
                mksquashfs.from_tar(content, files, partial, options, epoch, programs, tracker)
        partial.chmod(0o644)
        _sync(partial)
        _record(output, key, config, partial)
        partial.rename(output)
        _sync(output.parent)
    finally:
        partial.unlink(missing_ok=True)


def _epoch(config: ImageConfig) -> int:
    """SOURCE_DATE_EPOCH, else the image's creation time: the newest time in the file."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None:
        return config.created
    if not (text.isascii() and text.isdigit() and int(text) <= NEWEST):
        raise RequestError(
            f"SOURCE_DATE_EPOCH is {text!r}", mend="seconds since 1970, or leave it unset"
        )
    return int(text)


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.name}.json")


def _record(output: Path, key: str, config: ImageConfig, written: Path) -> None:
    """Put the key beside the output, before the output: a record without its file is harmless."""
    facts = {
        "key": key,
        "source": config.reference,
        "image": config.digest,
        "size": written.stat().st_size,
        "mtime_ns": written.stat().st_mtime_ns,
        "sha256": sha256(written),
    }
    partial = written.with_name(f"{written.name}.json")
    partial.write_text(json.dumps(facts, indent=2) + "\n")
    partial.chmod(0o644)  # whoever may read the file may see that it is up to date
    _sync(partial)  # an empty record after a power failure would make the file look not ours
    partial.rename(_beside(output))


def read_record(output: Path) -> dict[str, Any] | None:
    """What is noted beside a squash file; None where there is nothing of ours."""
    try:
        facts = json.loads(_beside(output).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= {"key", "size", "sha256"} else None


def _is(output: Path, key: str) -> bool:
    """Whether the output is the file of this key, untouched since it was written."""
    facts = read_record(output)
    if facts is None or facts["key"] != key or not output.is_file():
        return False
    found = output.stat()
    if found.st_size != facts["size"]:
        return False
    # Reading a file of many gigabytes takes long; its time tells whether that is called for.
    return found.st_mtime_ns == facts.get("mtime_ns") or sha256(output) == facts["sha256"]


def _may_replace(output: Path, options: Options) -> None:
    if output.is_dir():
        raise RequestError("the output is a folder", where=str(output), mend="name a file")
    if os.path.lexists(output) and read_record(output) is None and not options.force:
        raise RequestError(
            "the output exists and was not made by sqshforge",
            where=str(output),
            mend="add --force to replace it, or name another output",
        )


def _remove_leftovers(output: Path) -> None:
    """Remove what killed packers left; the lock is held, so no other packer is at work."""
    for path in output.parent.glob(f".{glob.escape(output.name)}.*.tmp*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """See a file, or the names in a folder, safely on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
