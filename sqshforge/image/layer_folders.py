"""Which folders of merged layers lie in one layer alone, so that their files can be read there.

A file that is opened through the kernel's merge costs an inode more, and another open. What is
merged, and how, is still the kernel's to say: names come from it, and the files of a folder that
may be of several layers are read through the merge.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# A folder that was renamed says so in an attribute: what was below its former name is seen there.
RENAMED = ("trusted.overlay.redirect", "user.overlay.redirect")
# So does a file of which a layer above its own changed an owner or a mode, and copied nothing else.
METADATA = ("trusted.overlay.metacopy", "user.overlay.metacopy")


@dataclass(frozen=True)
class LayerFolders:
    """Folders of merged layers, by their paths in the merge; the layers with the highest first."""

    layers: Sequence[Path]
    _found: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)

    def alone(self, path: bytes) -> bytes | None:
        """The folder of the only layer that has one of this path; None where there may be others.

        The merge must show a folder there. What has this name in the layer's folder is then what
        the merge shows, and what it shows beside that came from elsewhere.
        """
        found = self._holders(path)
        return found[0] if len(found) == 1 else None

    def _holders(self, path: bytes) -> tuple[bytes, ...]:
        """The folders of that path in all layers, also hidden ones; none where that is not known.

        One that an upper layer hides counts: it only makes that a folder is taken for a merged one.
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
    except OSError:  # a file system without attributes
        return []
