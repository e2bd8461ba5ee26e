"""What to pack and how, and the record of that beside a squash file: FILE.sqsh.json."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sqshforge import project
from sqshforge.errors import WorkError
from sqshforge.host import files
from sqshforge.host.files import publish
from sqshforge.hot import HotList
from sqshforge.image import enroot
from sqshforge.image.enroot import ImageConfig
from sqshforge.squash.mksquashfs import Options
from sqshforge.squashfs.hot_note import HotRange

FORMAT = 8  # part of every key: raised when the same inputs begin to give other bytes
# The first line of a signature in FILE.sqsh.sig, which sqshforge/inspect/signature.py writes.
ARMOR = b"-----BEGIN SSH SIGNATURE-----"
SIGNATURE_LIMIT = 1 << 16  # bytes read of it


@dataclass(frozen=True)
class PackRequest:
    """One image and the options to pack it with."""

    config: ImageConfig
    options: Options
    base_epoch: int  # the newest time outside of /sqshforge, seconds since 1970
    epoch: int  # the newest time in the file, seconds since 1970
    tool: str  # the squash tool and its version

    @classmethod
    def of(cls, config: ImageConfig, options: Options, tool: str) -> PackRequest:
        """Make a request with SOURCE_DATE_EPOCH, else with the times at which the image was made.

        Raises `RequestError` for an invalid SOURCE_DATE_EPOCH.
        """
        asked = project.source_date_epoch()
        if asked is not None:
            return cls(config, options, asked, asked, tool)
        base = config.created if config.base_created is None else config.base_created
        return cls(config, options, base, config.created, tool)

    @property
    def files(self) -> dict[str, bytes]:
        """Enroot's four files."""
        return enroot.files(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the bytes depend on, apart from the image."""
        settings = {
            "level": self.options.level,
            "block": self.options.block,
            "xattrs": self.options.xattrs,
            "devices": self.options.devices,
            "tool": self.tool,
            "base_epoch": self.base_epoch,
            "epoch": self.epoch,
        }
        return {**settings, "hot": self.hot.digest} if self.hot.lines else settings

    @property
    def hot(self) -> HotList:
        """The files that come first."""
        return self.options.hot

    @property
    def key(self) -> str:
        """The content key: `content_key` of the image and the settings."""
        return content_key(self.config, self.settings)

    def base_key(self, layers: Sequence[str]) -> str:
        """The key of the image without /sqshforge, which consists of these layers."""
        files = {name: data.decode("latin-1") for name, data in self.files.items()}
        settings = {name: value for name, value in self.settings.items() if name != "epoch"}
        return _digest({"layers": list(layers), "files": files, **settings})


def content_key(config: ImageConfig, settings: Mapping[str, Any]) -> str:
    """The digest of everything that the bytes of a squash file depend on.

    An image counts as its layers and what its config says about running it; the name and the store
    that it was found under do not matter.
    """
    facts = asdict(replace(config, size=0))
    if config.layers:
        facts = {**facts, "reference": "", "digest": ""}
    return _digest({"config": facts, **settings})


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write_record(
    output: Path,
    request: PackRequest,
    base: str | None,
    pieces: Sequence[str],
    file: Path,
    hot: HotRange | None,
) -> None:
    """Write the record beside the output; `file` is the output, or the file that will become it.

    `hot` is where its hot files lie.
    """
    found = file.stat()
    facts = {
        "format": FORMAT,
        "key": request.key,
        "image": asdict(request.config),
        "settings": request.settings,
        "base": base,
        "hot": None if hot is None else asdict(hot),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "digest": files.digest_of_pieces(pieces),
    }
    publish((json.dumps(facts, indent=2) + "\n").encode(), record_path(output))


def read_record(output: Path) -> dict[str, Any] | None:
    """The record beside a squash file; None if there is none that sqshforge wrote."""
    facts = files.read_object(record_path(output))
    if facts is None or not isinstance(facts.get("key"), str):
        return None
    return facts if isinstance(facts.get("size"), int) else None


def record_key(facts: Mapping[str, Any]) -> str:
    """The content key that follows from the facts in a record of this `FORMAT`.

    Raises `WorkError` if the record does not have the form that sqshforge writes.
    """
    settings = facts.get("settings")
    if not isinstance(settings, dict):
        raise _broken()
    return content_key(record_image(facts), settings)


def record_format(facts: Mapping[str, Any]) -> int:
    """The `FORMAT` of the version that wrote a record; the current one if it has none."""
    found = facts.get("format", FORMAT)
    if not isinstance(found, int):
        raise _broken()
    return found


def record_image(facts: Mapping[str, Any]) -> ImageConfig:
    """The image that a record names; `WorkError` if it is not in the form that sqshforge writes."""
    names = {one.name for one in fields(ImageConfig)}
    try:
        words = {name: _frozen(value) for name, value in facts["image"].items() if name in names}
        return ImageConfig(**words)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _broken() from None


def _broken() -> WorkError:
    return WorkError("the record has another version, or is corrupt")


def _frozen(value: Any) -> Any:
    """Convert lists from JSON back to the tuples that they were."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


def fitting(output: Path, request: PackRequest) -> str | None:
    """The key of the output if it is the wanted file and unchanged since it was written, else None.

    The wanted file is the one that the request would give or, with `keep`, any of this image.
    """
    facts = read_record(output)
    if facts is None or not output.is_file():
        return None
    wanted = [request.key]
    if request.options.keep and isinstance(facts.get("settings"), dict):
        wanted.append(content_key(request.config, facts["settings"]))
    found = output.stat()
    if facts["key"] not in wanted or found.st_size != facts["size"]:
        return None
    if not is_untouched(found, facts) and (
        files.digest(output, request.options.jobs) != facts.get("digest")
    ):
        return None
    key: str = facts["key"]
    return key


def is_untouched(found: os.stat_result, facts: Mapping[str, Any]) -> bool:
    """Whether a file's times are those in its record.

    Reading a file of many gigabytes takes long; its times tell whether that is needed.
    """
    times = (facts.get("mtime_ns"), facts.get("ctime_ns"))
    return (found.st_mtime_ns, found.st_ctime_ns) == times


def stale_signature(output: Path, request: PackRequest, pieces: Sequence[str]) -> Path | None:
    """The signature beside a squash file if it signs another file than these pieces make."""
    path = signature_path(output)
    if not path.is_file():  # opening a FIFO would wait for a writer
        return None
    try:
        with path.open("rb") as file:
            signed, armor, _ = file.read(SIGNATURE_LIMIT).partition(ARMOR)
    except OSError:
        return None
    wanted = (files.digest_of_pieces(pieces), request.key)
    return path if armor and not all(one.encode() in signed for one in wanted) else None


def signature_path(output: Path) -> Path:
    """The path of a squash file's signature."""
    return output.with_name(f"{output.name}.sig")


def record_path(output: Path) -> Path:
    """The path of a squash file's record."""
    return output.with_name(f"{output.name}.json")
