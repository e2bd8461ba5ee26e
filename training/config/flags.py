"""Command-line flags, and a configuration made of them: what all entry points share.

Names are exact, values strict, and all faults are told at once. Both `--name=value` and
`--name value` work. A flag that is not known is an error that names the nearest one; a boolean must
read as one, and its flag alone means true.

No two sections have a setting of the same name, so that a name alone says which one is meant. Flags
of other systems that are settings of ours are aliases. Light: no torch here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from training.config.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from training.config.lr_schedule import TAKES, ScheduleConfig
from training.config.setting import Setting, boolean, settings
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


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
    "run": RunConfig,
}
SCHEDULE_FLAG = Flag(
    "schedule", str, ScheduleConfig.name, f"of the learning rate: {', '.join(TAKES)}"
)


def setting_flags(aliases: Mapping[str, tuple[str, ...]]) -> list[Flag]:
    """Give a flag for every setting, under its own name and its aliases."""
    found = []
    for section in SECTIONS.values():
        if section is ScheduleConfig:
            found.append(SCHEDULE_FLAG)
        for one in settings(section):
            flag = Flag.of(one, aliases.get(one.name, ()))
            if section is ScheduleConfig:
                those = ", ".join(name for name, takes in TAKES.items() if one.name in takes)
                flag = replace(flag, help=f"{those}: {flag.help}")
            found.append(flag)
    return found


def assemble(given: Mapping[str, Any], model: Mapping[str, Any]) -> Config:
    """Make the configuration of a model from settings by name. Raises RequestError.

    model: name and sizes. Settings that are not given have their defaults.
    """

    def part(section: type) -> dict[str, Any]:
        return {one.name: given[one.name] for one in settings(section) if one.name in given}

    schedule = {"name": given["schedule"]} if "schedule" in given else {}
    return Config(
        model=ModelConfig(**model, **part(ModelConfig)),
        data=DataConfig(**part(DataConfig)),
        optim=OptimConfig(
            schedule=ScheduleConfig(**schedule, **part(ScheduleConfig)), **part(OptimConfig)
        ),
        parallel=ParallelConfig(**part(ParallelConfig)),
        run=RunConfig(**part(RunConfig)),
    )


@dataclass(frozen=True)
class FlagAlias:
    """A flag of a system that is a setting of ours: under another name, or another default."""

    name: str
    setting: str
    default: Any
    aliases: tuple[str, ...] = ()


def with_ours(
    own: Iterable[Flag], known: Sequence[FlagAlias], taken: Collection[str]
) -> tuple[Flag, ...]:
    """Give a system's own flags, those that are settings, and all settings that it has none for.

    `taken` are the settings that flags of its own stand for.
    """
    by_setting = {flag.name: flag for flag in setting_flags({})}
    as_known = [
        replace(
            by_setting.pop(one.setting), name=one.name, default=one.default, aliases=one.aliases
        )
        for one in known
    ]
    return (*own, *as_known, *(flag for name, flag in by_setting.items() if name not in taken))


def settings_of(given: Mapping[str, Any], known: Sequence[FlagAlias]) -> dict[str, Any]:
    """Give what was given by the names of our settings."""
    names = {one.name: one.setting for one in known}
    return {names.get(name, name): value for name, value in given.items()}


def names_of(known: Sequence[FlagAlias], **others: str) -> dict[str, str]:
    """Give what errors call by our names -> the flag that was meant."""
    return {**{one.setting: one.name for one in known}, **others}


def wrong_choices(given: Mapping[str, Any], choices: Mapping[str, Collection[str]]) -> list[str]:
    """List the flags that were given, or are by default, none of their values."""
    return [
        f"--{name}: must be one of {', '.join(known)}, not {given[name]!r}"
        for name, known in choices.items()
        if given[name] is not None and given[name] not in known
    ]
