"""Find the folders of merged layers that lie in one layer only, to read their files there.

Opening a file through the kernel's merge costs one more inode and one more open. The kernel still
decides what is merged and how: names come from the merge, and the files of a folder that several
layers may have are read through it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Attributes of a renamed folder: the content below its former name appears in it.
RENAMED = ("trusted.overlay.redirect", "user.overlay.redirect")
# Attributes of a file in an upper layer that changed only its owner or mode and has no content.
METADATA = ("trusted.overlay.metacopy", "user.overlay.metacopy")


@dataclass(frozen=True)
class LayerFolders:
    """Folders of merged layers, by their paths in the merge; `layers` has the highest first."""

    layers: Sequence[Path]
    _found: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)

    def alone(self, path: bytes) -> bytes | None:
        """The folder at this path in the only layer that has one; None if others may have it too.

        The merge must show a folder there. Then each name in the layer's folder is the file that
        the merge shows; names that only the merge shows came from elsewhere.
        """
        found = self._holders(path)
        return found[0] if len(found) == 1 else None

    def _holders(self, path: bytes) -> tuple[bytes, ...]:
        """The folders at a path in all layers, also hidden ones; empty if that is unknown.

        A folder that an upper layer hides counts: at worst, a folder is taken for a merged one.
        """
        if path not in self._found:
            if path:
                above, _, name = path.rpartition(b"/")
                held = (folder + b"/" + name for folder in self._holders(above))
            else:
                held = (os.fsencode(layer) for layer in self.layers)
            found = tuple(folder for folder in held if _is_folder(folder))
            if len(found) > 1 and any(map(_is_renamed, found)):
                found = ()
            self._found[path] = found
        return self._found[path]


def _is_folder(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_renamed(folder: bytes) -> bool:
    return any(name in RENAMED for name in _attributes(folder))


def is_metadata_alone(file: int) -> bool:
    """Whether an open file of a layer has its content in another layer."""
    found = _attributes(file)
    return bool(found) and any(name in METADATA for name in found)


def _attributes(place: bytes | int) -> list[str]:
    try:
        return os.listxattr(place)
    except OSError:  # the file system has no attributes
        return []
