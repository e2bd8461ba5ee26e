"""The build context: the Dockerfile and all other files an engine gets, laid out in a folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

# Folders of the context have this time (2020-01-01), and files have a time in the half year after
# it, derived from their content. So equal contexts have equal times, and BuildKit, which compares
# only sizes and times, notices every edit.
TIME = 1_577_836_800
SPREAD = 1 << 24  # seconds
# Folders that a Dockerfile may mount must exist, even if empty.
FOLDERS = (
    *("apt", "archives", "patches", "payload", "requirements", "sdists", "sources"),
    *("triton-cache", "wheels"),
)


@dataclass(frozen=True)
class Context:
    """A build context: small files by content, large ones by their path.

    `loose` files describe one build, and do not decide whether an image is up to date.
    """

    files: Mapping[str, bytes]
    loose: Mapping[str, bytes] = field(default_factory=dict)
    large: Mapping[str, Path] = field(default_factory=dict)

    def holding(self, large: Mapping[str, Path]) -> Context:
        """Return this context with large files, which map places in it to paths of files."""
        return replace(self, large=large)

    def digest(self) -> str:
        """Return a digest that changes whenever the image's inputs change.

        Large files do not count: checksums in the small files determine them.
        """
        total = hashlib.sha256()
        for name in sorted(self.files):
            total.update(f"{name}\0{len(self.files[name])}\0".encode())
            total.update(self.files[name])
        return f"sha256:{total.hexdigest()}"

    def write(self, folder: Path) -> None:
        """Lay the context out in a folder, replacing what was in it.

        Large files are hard links if the file system allows it, else copies.
        """
        staging = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        for name in FOLDERS:
            (staging / name).mkdir(parents=True)
        for name, content in {**self.files, **self.loose}.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755 if content.startswith(b"#!") else 0o644)
            time = TIME + int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % SPREAD
            os.utime(path, (time, time))
        for name, source in self.large.items():
            _link(source, staging / name)
        for path in sorted(staging.rglob("*"), reverse=True):
            if path.is_dir():
                path.chmod(0o755)
                os.utime(path, (TIME, TIME))
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)


def _link(source: Path, place: Path) -> None:
    """Put a file, or a folder of files, at its place in the context."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        for path in source.iterdir():
            _link(path, place / path.name)
        return
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copyfile(source, place)
