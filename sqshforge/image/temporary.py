"""Containers and folders for a while, named so that what a killed packer left can go."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def name() -> str:
    """A name for a working container that says whose it is: a killed packer cannot remove it."""
    return f"{_prefix()}{os.getpid()}.{uuid.uuid4().hex[:12]}"


def abandoned(names: Iterable[str]) -> list[str]:
    """The names, among all, that are of packers of this machine that are no more."""
    ours = (one for one in names if one.startswith(_prefix()))
    return [
        one
        for one in ours
        if not Path("/proc", one.removeprefix(_prefix()).partition(".")[0]).exists()
    ]


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder to mount on, for the length of a block, where temporary files go."""
    above = Path(tempfile.gettempdir())
    for one in abandoned(path.name for path in above.iterdir()):
        with contextlib.suppress(OSError):  # it is another user's
            (above / one).rmdir()
    place = above / name()
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        place.rmdir()


def _prefix() -> str:
    return re.sub(r"[^\w.-]", "-", f"sqshforge-pack-{os.uname().nodename}.", flags=re.ASCII)
