"""Containers that an engine makes for us: named so that what a killed packer left can go."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path


def name() -> str:
    """A name for a working container that says whose it is: a killed packer cannot remove it."""
    return f"{_prefix()}{os.getpid()}.{uuid.uuid4().hex[:12]}"


def abandoned(names: Iterable[str]) -> list[str]:
    """The working containers, among all, of packers of this machine that are no more."""
    ours = (one for one in names if one.startswith(_prefix()))
    return [
        one
        for one in ours
        if not Path("/proc", one.removeprefix(_prefix()).partition(".")[0]).exists()
    ]


def _prefix() -> str:
    return re.sub(r"[^\w.-]", "-", f"sqshforge-pack-{os.uname().nodename}.", flags=re.ASCII)
