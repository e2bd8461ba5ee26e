"""Patches as files in patches/: the header that each one has, read and checked."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.lock.model import LockedPatch
from sqshforge.recipe import Recipe


def locked(recipe: Recipe, patches: Path) -> tuple[LockedPatch, ...]:
    """The patches that a recipe names, each with its sum and that of the file it makes."""
    return tuple(
        _read(patches / file, file, of)
        for of, files in sorted(recipe.patches.items())
        for file in files
    )


def _read(path: Path, file: str, of: str) -> LockedPatch:
    """One patch; `RequestError` for one that is absent or does not say what it makes."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        known = sorted(f"{p.parent.name}/{p.name}" for p in path.parent.parent.glob("*/*.patch"))
        raise RequestError(
            f"the patch {file} does not exist",
            where=f"patches of {of}",
            mend=f"patches are: {', '.join(known)}",
        ) from None
    header = text.partition("\n--- ")[0]
    after = re.search(r"^After: ([0-9a-f]{64})$", header, re.MULTILINE)
    changed = re.findall(r"^\+\+\+ [^/\s]+/(\S+)", text, re.MULTILINE)
    if after is None or len(changed) != 1:
        raise RequestError(
            "a patch changes one file and says in its header what sum that has then (After: ...)",
            where=str(path),
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LockedPatch(file=file, sha256=digest, of=of, path=changed[0], after=after[1])
