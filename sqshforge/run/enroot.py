"""The call of `enroot start`: its arguments, its environment, and its configuration."""

from __future__ import annotations

import os
import pkgutil
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError, RequestError
from sqshforge.host.programs import Programs
from sqshforge.run import passed
from sqshforge.run.mounts import Mount

CONFIGURATION = "enroot.conf"
ASKED = "SQSHFORGE_ENVIRON"  # lines of NAME=VALUE that the configuration puts into a container


@dataclass(frozen=True)
class Call:
    """The program to become: its arguments and its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def call(
    image: Path,
    command: Sequence[str],
    mounts: Sequence[Mount],
    asked: Mapping[str, str],
    programs: Programs,
) -> Call:
    """The call that starts a command directly from the squash file.

    No value appears among the arguments of a process: enroot takes the values of `--env NAME` from
    its own environment. The variables in `asked` are not set there (a PATH or an LD_PRELOAD would
    affect enroot too). Raises `MissingError` if enroot is not installed, `RequestError` for a
    variable that it cannot pass.
    """
    enroot = programs.which("enroot")
    if enroot is None:
        raise MissingError(
            "enroot is not installed, and --runtime=enroot asks for it",
            fix="install it (https://github.com/NVIDIA/enroot), or take --runtime=builtin",
        )
    for name, value in asked.items():
        _require_passable(name, value)
    text = _configuration()
    argv = [str(enroot), "start", "--rw", "--conf", str(_file(text))]
    for one in mounts:
        kind = "dir" if one.source.is_dir() else "file"
        # With rbind, enroot would leave mounts below a read-only source writable.
        options = f"x-create={kind},{'bind,ro' if one.read_only else 'rbind,rw'}"
        argv += ["--mount", f"{_field(str(one.source))}:{_field(one.target)}:{options}"]
    for name in passed.names(os.environ):
        if name not in asked and _is_line(os.environ[name]):  # --env would override `asked`
            argv += ["--env", name]
    lines = "".join(f"{name}={value}\n" for name, value in asked.items())
    environment = {**os.environ, ASKED: lines, **_functions(text, programs)}
    return Call((*argv, str(image), *command), environment)


def _field(path: str) -> str:
    r"""Escape a path as in fstab: a blank would end it, so it is written as \040."""
    return re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", path)


def _require_passable(name: str, value: str) -> None:
    if not passed.is_name(name):
        raise RequestError(
            f"enroot does not accept the variable name {name!r}",
            where="--env",
            fix="use letters, digits and _ only, or --runtime=builtin",
        )
    if not _is_line(value):
        raise RequestError(
            f"enroot cannot pass a value with line breaks: {name} has",
            where="--env",
            fix="--runtime=builtin",
        )


def _is_line(value: str) -> bool:
    """Whether a value is one line: enroot would take a second line for another variable."""
    return "\n" not in value


def _configuration() -> str:
    data = pkgutil.get_data("sqshforge.run", CONFIGURATION)
    assert data is not None
    return data.decode()


def _file(text: str) -> Path:
    """The configuration as a file; if run from a zip file, a temporary one that removes itself."""
    place = Path(__file__).with_name(CONFIGURATION)
    if place.is_file():
        return place
    number, name = tempfile.mkstemp(prefix="sqshforge-", suffix=".conf")
    with os.fdopen(number, "w") as file:
        file.write(f'{text}rm -f -- "${{BASH_SOURCE[0]}}"\n')
    return Path(name)


def _functions(text: str, programs: Programs) -> dict[str, str]:
    """The configuration's functions for the FUSE servers, as variables that bash imports.

    A server that is not installed gets none: enroot reports that.
    """
    found = re.findall(r"^([a-z-]+)\(\) (\{.*\})$", text, re.MULTILINE)
    return {f"BASH_FUNC_{name}%%": f"() {body}" for name, body in found if programs.which(name)}
