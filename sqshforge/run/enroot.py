"""The call of `enroot start`: its words, its environment, and what keeps the root to the end."""

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
ASKED = "SQSHFORGE_ENVIRON"  # lines of NAME=VALUE, which the configuration has put into a container


@dataclass(frozen=True)
class Call:
    """What to become: a program's words and its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def call(
    image: Path,
    command: Sequence[str],
    mounts: Sequence[Mount],
    asked: Mapping[str, str],
    programs: Programs,
) -> Call:
    """The call that starts a command straight from the file.

    No value is seen among the words of a process: enroot takes those of `--env NAME` from its own
    environment. What is asked for is no part of that (a PATH or an LD_PRELOAD would be for enroot
    too). Raises `MissingError` where enroot is not installed, `RequestError` for a variable that it
    cannot pass.
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
        # With rbind, enroot would leave what is mounted below a read-only source writable.
        options = f"x-create={kind},{'bind,ro' if one.read_only else 'rbind,rw'}"
        argv += ["--mount", f"{_field(str(one.source))}:{_field(one.target)}:{options}"]
    for name in passed.names(os.environ):
        if name not in asked and _is_line(os.environ[name]):  # enroot's --env would win
            argv += ["--env", name]
    lines = "".join(f"{name}={value}\n" for name, value in asked.items())
    environment = {**os.environ, ASKED: lines, **_functions(text, programs)}
    return Call((*argv, str(image), *command), environment)


def _field(path: str) -> str:
    r"""A path as in an fstab, where \040 stands for a blank, which would end it."""
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
    """Whether a value is one line: of the next one, enroot would make a variable of its own."""
    return "\n" not in value


def _configuration() -> str:
    data = pkgutil.get_data("sqshforge.run", CONFIGURATION)
    assert data is not None
    return data.decode()


def _file(text: str) -> Path:
    """The configuration as a file; where this runs out of a zip file, one that removes itself."""
    place = Path(__file__).with_name(CONFIGURATION)
    if place.is_file():
        return place
    number, name = tempfile.mkstemp(prefix="sqshforge-", suffix=".conf")
    with os.fdopen(number, "w") as file:
        file.write(f'{text}rm -f -- "${{BASH_SOURCE[0]}}"\n')
    return Path(name)


def _functions(text: str, programs: Programs) -> dict[str, str]:
    """The configuration's functions for the FUSE servers, as bash takes them from its environment.

    None for a server that is not installed: enroot is to tell that.
    """
    found = re.findall(r"^([a-z-]+)\(\) (\{.*\})$", text, re.MULTILINE)
    return {f"BASH_FUNC_{name}%%": f"() {body}" for name, body in found if programs.which(name)}
