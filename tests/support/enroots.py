"""Enroot for tests: the real one of this machine, and one that stands in for it where none is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import containers

STAND_IN = Path(__file__).with_name("stand_in_enroot")

# What a training job does when it is asked to end: it saves, from a root that must still be there.
SAVES = """
trap "cat /usr/file > /out/first && sleep 0.3 && cat /usr/file > /out/saved && exit 85" TERM
trap "" USR1 USR2 HUP
touch /out/ready
while :; do sleep 0.05; done
"""


def stand_in(place: Path) -> dict[str, str]:
    """The environment in which the stand-in is found; it notes in a folder how it was called."""
    return {"PATH": f"{STAND_IN}:{os.environ['PATH']}", "STAND_IN": str(place)}


def words(place: Path) -> list[str]:
    """What the stand-in was called with."""
    return (place / "words").read_text().split("\0")[:-1]


def real(place: Path) -> dict[str, str]:
    """The environment of the real one, whose own folders are in this one."""
    folders = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
    folders |= {f"XDG_{name}_HOME": f"home/{name}" for name in ("CACHE", "CONFIG", "DATA")}
    for folder in folders.values():
        (place / folder).mkdir(parents=True, exist_ok=True)
    return {name: str(place / folder) for name, folder in folders.items()}


@contextmanager
def patched(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables, for the length of a block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def argv(image: Path, *words: str | Path) -> list[str]:
    """The command line that starts a container by whatever enroot is found first."""
    return [sys.executable, "-m", "sqshforge", "run", str(image), *map(str, words)]


def marked() -> str:
    """The words that have a container's command found by the mark of its test."""
    return f"{containers.MARK}={os.environ[containers.MARK]}"
