"""Command-line flags: exact names, strict values, all faults told at once.

Both `--name=value` and `--name value` work. A flag that is not known is an error that names the
nearest one; a boolean must read as one, and its flag alone means true.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from training.config.setting import Setting, boolean
from training.errors import RequestError


@dataclass(frozen=True)
class Flag:
    """One flag: `read` turns its text into a value, or raises ValueError with what it should be."""

    name: str
    read: Callable[[str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    listed: bool = False  # elsewhere it takes a list; here one value, and more are refused by name
    short: str = ""  # its letter

    @classmethod
    def of(cls, setting: Setting, aliases: tuple[str, ...] = ()) -> Flag:
        """Make the flag that has a setting's own name."""
        about = setting.about
        help = f"{', '.join(about.choices)}: {about.text}" if about.choices else about.text
        return cls(setting.name, setting.read, setting.default, help, aliases)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def parse(
    flags: Sequence[Flag], arguments: Sequence[str], *, program: str, about: str
) -> dict[str, Any]:
    """Read the arguments into {name: value}. Raises RequestError listing every fault."""
    parser = _Parser(
        prog=program,
        description=about,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag in flags:
        letters = [f"-{flag.short}"] if flag.short else []
        spellings = [*letters, *(f"--{name}" for name in (flag.name, *flag.aliases))]
        shown = f" (default: {flag.default})" if flag.default not in ("", None) else ""
        words: dict[str, Any] = {"nargs": "+"} if flag.listed else {}
        if flag.read is boolean:
            words = {"nargs": "?", "const": "True"}
        parser.add_argument(
            *spellings,
            dest=flag.name,
            **words,
            metavar="VALUE",
            help=(flag.help + shown).replace("%", "%%"),
        )
    given, unknown = parser.parse_known_args(list(arguments))
    known = [name for flag in flags for name in (flag.name, *flag.aliases)]
    found = [_unknown(argument, known) for argument in _heads(unknown)]
    values = {}
    for flag in flags:
        text = getattr(given, flag.name)
        values[flag.name] = flag.default
        if flag.listed and text is not None:
            if len(text) > 1:
                found.append(f"--{flag.name}: takes one value, and here are {len(text)}")
            text = text[0]
        if text is not None:
            try:
                values[flag.name] = flag.read(text)
            except ValueError as error:
                found.append(f"--{flag.name}: must be {error}, not {text!r}")
    if found:
        raise RequestError.of(found)
    return values


def _heads(unknown: Sequence[str]) -> list[str]:
    """Leave out the values that follow unknown flags."""
    return [
        argument
        for before, argument in zip(["", *unknown], unknown, strict=False)
        if argument.startswith("-") or not before.startswith("--") or "=" in before
    ]


def _unknown(argument: str, known: Sequence[str]) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return f"{argument!r} is not a flag; write --name=value"
    near = get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.5)
    return f"{name}: there is no such flag" + (f"; did you mean --{near[0]}?" if near else "")
