"""Enroot for tests: the real one of this machine, or a stand-in if it has none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import containers

STAND_IN = Path(__file__).with_name("stand_in_enroot")

# What a training job does when asked to end: it saves, from a root that must still exist.
SAVES = """
trap "cat /usr/file > /out/first && sleep 0.3 && cat /usr/file > /out/saved && exit 85" TERM
trap "" USR1 USR2 HUP
touch /out/ready
while :; do sleep 0.05; done
"""


def stand_in(place: Path) -> dict[str, str]:
    """Return the environment that finds the stand-in, which records its calls in a folder."""
    return {"PATH": f"{STAND_IN}:{os.environ['PATH']}", "STAND_IN": str(place)}


def words(place: Path) -> list[str]:
    """Return the words that the stand-in was called with."""
    return (place / "words").read_text().split("\0")[:-1]


def real(place: Path) -> dict[str, str]:
    """Return the environment of the real enroot, with its own folders in this one."""
    folders = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
    folders |= {f"XDG_{name}_HOME": f"home/{name}" for name in ("CACHE", "CONFIG", "DATA")}
    for folder in folders.values():
        (place / folder).mkdir(parents=True, exist_ok=True)
    return {name: str(place / folder) for name, folder in folders.items()}


@contextmanager
def patched(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for the length of a block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def argv(image: Path, *words: str | Path) -> list[str]:
    """Return the command line that starts a container with the first enroot found."""
    return [sys.executable, "-m", "sqshforge", "run", str(image), *map(str, words)]


def marked() -> str:
    """Return the words that let a container's command be found by its test's mark."""
    return f"{containers.MARK}={os.environ[containers.MARK]}"
