"""Free space is looked at before the work, not found missing in the middle of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from sqshforge.errors import MissingError
from sqshforge.host.terminal import human


def require_space(folder: Path, needed: int, work: str) -> None:
    """Raise `MissingError` where a folder's file system has fewer than `needed` bytes free."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MissingError(
            f"the disk is too small for {work}: it needs {needed:,} bytes ({human(needed)}), "
            f"{free:,} are free, {needed - free:,} are missing",
            where=str(folder),
            mend=f"free {human(needed - free)} on the file system of {existing}",
        )
