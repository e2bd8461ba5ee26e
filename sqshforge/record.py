"""FILE.sqsh.json: what a squash file was made from, and how to see that it is still that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqshforge import digest
from sqshforge.files import publish
from sqshforge.order import Order


def write(output: Path, order: Order, base: str | None, pieces: Sequence[str], file: Path) -> None:
    """Put it beside the output; `file` is that, or what will become it."""
    config, found = order.config, file.stat()
    running = ("reference", "created", "env", "entrypoint", "cmd", "workdir", "volumes", "labels")
    facts = {
        "key": order.key,
        "source": config.reference,
        "image": config.digest,
        "layers": config.layers,
        "config": {name: value for name, value in asdict(config).items() if name in running},
        "settings": order.settings,
        "base": base,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "digest": digest.whole(pieces),
    }
    publish((json.dumps(facts, indent=2) + "\n").encode(), beside(output))


def read(output: Path) -> dict[str, Any] | None:
    """What is noted beside a squash file; None where there is nothing of ours."""
    try:
        facts = json.loads(beside(output).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= {"key", "size"} else None


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
    return digest.of(output, order.options.jobs) == facts.get("digest")


def beside(output: Path) -> Path:
    """The place of a squash file's record."""
    return output.with_name(f"{output.name}.json")
