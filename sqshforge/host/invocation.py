"""Commands for the user to type next: each runs as it stands, from the folder they are in."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from sqshforge.project import Project


def sqshforge(*words: str | Path) -> str:
    """A call of this very program."""
    return shlex.join([*_program(), *map(shown, words)])


def make(project: Project, target: str, **variables: str) -> str:
    """A call of the checkout's Makefile."""
    here = [] if Path.cwd() == project.root else ["-C", shown(project.root)]
    settings = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join(["make", *here, target, *settings])


def python(*words: str | Path) -> str:
    """A call of the Python that has this package."""
    return shlex.join([shown(Path(sys.executable)), *map(shown, words)])


def shown(word: str | Path) -> str:
    """A path as it is reached from the current folder; any other word as it is."""
    if not isinstance(word, Path) or not word.is_absolute():
        return str(word)
    here = Path.cwd()
    return str(word.relative_to(here)) if word.is_relative_to(here) else str(word)


def _program() -> list[str]:
    """How this program was called: by the name that the PATH has, else by its place."""
    called = Path(sys.argv[0])
    if called.name != "sqshforge":  # `python -m sqshforge`
        return [shown(Path(sys.executable)), "-m", "sqshforge"]
    found = shutil.which("sqshforge")
    if found is not None and Path(found).samefile(called):
        return ["sqshforge"]
    return [shown(called.absolute())]
