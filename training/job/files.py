"""Small files of the kernel and of installed software."""

from __future__ import annotations

from pathlib import Path


def content(path: Path) -> str:
    """Read a file without the space around its text; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
