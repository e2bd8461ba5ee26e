"""FILE.sqsh.json: what a squash file was made from, and how to see that it is still that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sqshforge.errors import WorkError
from sqshforge.host import files
from sqshforge.host.files import publish
from sqshforge.image.enroot import ImageConfig
from sqshforge.squash.order import Order, content_key


def write(output: Path, order: Order, base: str | None, pieces: Sequence[str], file: Path) -> None:
    """Put it beside the output; `file` is that, or what will become it."""
    found = file.stat()
    facts = {
        "key": order.key,
        "image": asdict(order.config),
        "settings": order.settings,
        "base": base,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "digest": files.digest_of_pieces(pieces),
    }
    publish((json.dumps(facts, indent=2) + "\n").encode(), beside(output))


def read(output: Path) -> dict[str, Any] | None:
    """What is noted beside a squash file; None where there is nothing of ours."""
    try:
        facts = json.loads(beside(output).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= {"key", "size"} else None


def key(facts: Mapping[str, Any]) -> str:
    """The content key of what a record says; `WorkError` where it is not as we write it."""
    settings = facts.get("settings")
    if not isinstance(settings, dict):
        raise _broken()
    return content_key(image(facts), settings)


def image(facts: Mapping[str, Any]) -> ImageConfig:
    """The image that a record names; `WorkError` where it is not as we write it."""
    names = {one.name for one in fields(ImageConfig)}
    try:
        words = {name: _frozen(value) for name, value in facts["image"].items() if name in names}
        return ImageConfig(**words)
    except (AttributeError, KeyError, TypeError):
        raise _broken() from None


def _broken() -> WorkError:
    return WorkError("the record is of another version, or broken")


def _frozen(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


def fits(output: Path, order: Order) -> bool:
    """Whether the output is the file that would come out, untouched since it was written."""
    facts = read(output)
    if facts is None or facts["key"] != order.key or not output.is_file():
        return False
    found = output.stat()
    if found.st_size != facts["size"]:
        return False
    # Reading a file of many gigabytes takes long; its times tell whether that is called for.
    if (found.st_mtime_ns, found.st_ctime_ns) == (facts.get("mtime_ns"), facts.get("ctime_ns")):
        return True
    return files.digest(output, order.options.jobs) == facts.get("digest")


def beside(output: Path) -> Path:
    """The place of a squash file's record."""
    return output.with_name(f"{output.name}.json")
