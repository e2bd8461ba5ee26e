"""Command-line flags and the configuration made from them, as all entry points share them.

Names are exact, values strict, and all faults are reported at once. Both `--name=value` and
`--name value` work. An unknown flag is an error that names the nearest one; a boolean must read as
one, and its flag alone means true.

No two sections have a setting of the same name, so a name alone identifies a setting. Flags of
other systems that stand for our settings are aliases. No torch here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from training.cli import Parser, with_home
from training.config.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from training.config.lr_schedule import TAKES, ScheduleConfig
from training.config.setting import Setting, boolean, optional, settings
from training.errors import RequestError
from training.models import Sizes

TITLES = {
    "model": "model",
    "data": "data",
    "optim": "optimizer",
    "schedule": "learning rate",
    "parallel": "parallelism and memory",
    "run": "run, checkpoints and logs",
}
"""Section -> its title in the help."""
NOTHING: Mapping[str, str] = {}
LINE = 72
"""The most columns that a flag has with its choices; if they need more, help lists them below."""


@dataclass(frozen=True)
class Flag:
    """One flag: `read` turns text into a value, or raises ValueError saying what it should be."""

    name: str
    read: Callable[[str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    listed: bool = False  # it takes a list elsewhere; here one value, and more are refused by name
    short: str = ""  # its one-letter form
    choices: tuple[str, ...] = ()  # all values that it may have, besides its default
    section: str = ""  # where help shows it

    @classmethod
    def of(cls, setting: Setting, section: str = "", aliases: tuple[str, ...] = ()) -> Flag:
        """Make the flag of a setting, under the setting's name."""
        about, read, default = setting.about, setting.read, setting.default
        return cls(
            *(setting.name, read, default, about.text, aliases),
            choices=about.choices,
            section=section,
        )

    @property
    def spellings(self) -> list[str]:
        names = [f"--{name}" for name in (self.name, *self.aliases)]
        return [f"-{self.short}", *names] if self.short else names

    @property
    def kind(self) -> str:
        """What help shows for the value: the choices, if they fit on a line, else the type."""
        shown = f"{{{','.join(self.choices)}}}"
        if self.choices and len(", ".join([*self.spellings, shown])) <= LINE:
            return shown
        if isinstance(self.read, type):
            return {"Path": "PATH"}.get(self.read.__name__, "TEXT")
        made = str(getattr(self.read, "__annotations__", {}).get("return"))
        kinds = {"bool": "BOOL", "int": "INT", "float": "FLOAT"}
        made = made.removesuffix(" | None")
        return kinds.get(made, "TEXT")

    @property
    def shown(self) -> str:
        """The help, with the choices, if `kind` does not show them, and the default."""
        listed = self.choices and not self.kind.startswith("{")
        first = f"one of {', '.join(self.choices)}: " if listed else ""
        shown = f" (default: {self.default})" if self.default not in ("", None) else ""
        return first + self.help + shown


def grouped(flags: Iterable[Flag], common: Sequence[str]) -> dict[str, list[Flag]]:
    """Group flags by title as help shows them: the most used first, then section by section."""
    by_name = {flag.name: flag for flag in flags}
    found = {"most used": [by_name.pop(name) for name in common]} if common else {}
    order = ["", *TITLES, *(flag.section for flag in by_name.values())]
    for section in dict.fromkeys(order):
        those = [flag for flag in by_name.values() if flag.section == section]
        if those:
            found[TITLES.get(section, section or "options")] = those
    return found


def parse(
    flags: Sequence[Flag],
    arguments: Sequence[str],
    *,
    program: str,
    about: str,
    common: Sequence[str] = (),
    instead: Mapping[str, str] = NOTHING,
) -> dict[str, Any]:
    """Read the arguments into {name: value}. Raises RequestError listing every fault.

    common: the most used flags, which help shows first. instead: flags of a system that this
    program lacks -> what to do instead.
    """
    parser = Parser(program, about, usage=f"{program} [--FLAG=VALUE ...]", add_help=False)
    for index, (title, those) in enumerate(grouped(flags, common).items()):
        group = parser.add_argument_group(title)
        if index == 0:
            group.add_argument("-h", "--help", action="help", help="show this page and exit")
        for flag in those:
            words: dict[str, Any] = {"nargs": "+"} if flag.listed else {}
            if flag.read in (boolean, optional):
                words = {"nargs": "?", "const": "True"}
            group.add_argument(
                *flag.spellings,
                dest=flag.name,
                **words,
                metavar=flag.kind,
                help=flag.shown.replace("%", "%%"),
            )
    given, unknown = parser.parse_known_args(list(arguments))
    known = [name for flag in flags for name in (flag.name, *flag.aliases)]
    found = [_unknown(argument, known, instead) for argument in _heads(unknown)]
    values = {}
    for flag in flags:
        text = getattr(given, flag.name)
        values[flag.name] = flag.default
        if flag.listed and text is not None:
            if len(text) > 1:
                found.append(f"--{flag.name}: takes one value, but {len(text)} are given")
            text = text[0]
        if text is not None:
            try:
                values[flag.name] = flag.read(with_home(text) if flag.read is Path else text)
            except ValueError as error:
                found.append(f"--{flag.name}: must be {error}, not {text!r}")
            if flag.choices and text not in (*flag.choices, flag.default):
                found.append(f"--{flag.name}: {_no_choice(text, flag.choices)}")
    if found:
        raise RequestError.of(found)
    return values


def _no_choice(text: str, choices: Sequence[str]) -> str:
    near = get_close_matches(text, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"must be one of {', '.join(choices)}, not {text!r}{hint}"


def _heads(unknown: Sequence[str]) -> list[str]:
    """Leave out the values that follow unknown flags."""
    return [
        argument
        for before, argument in zip(["", *unknown], unknown, strict=False)
        if argument.startswith("-") or not before.startswith("--") or "=" in before
    ]


def _unknown(argument: str, known: Sequence[str], instead: Mapping[str, str]) -> str:
    name = argument.partition("=")[0]
    if name.removeprefix("--") in instead:
        return f"{name}: {instead[name.removeprefix('--')]}"
    if not name.startswith("-"):
        return f"{argument!r} is not a flag; fix: write --name=value"
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
    *("schedule", str, ScheduleConfig.name, "how the learning rate changes"),
    choices=tuple(TAKES),
    section="schedule",
)


def setting_flags() -> list[Flag]:
    """Return a flag for every setting, under its own name."""
    found = []
    for name, section in SECTIONS.items():
        if section is ScheduleConfig:
            found.append(SCHEDULE_FLAG)
        for one in settings(section):
            flag = Flag.of(one, name)
            if section is ScheduleConfig:
                those = ", ".join(name for name, takes in TAKES.items() if one.name in takes)
                flag = replace(flag, help=f"{those}: {flag.help}")
            found.append(flag)
    return found


MOST_USED = (
    *("model.name", "data.dataset_path", "data.seq_length", "data.batch_size"),
    *("optim.learning_rate", "schedule.name", "parallel.sharding_strategy"),
    *("run.save_ckpt_path", "run.num_steps", "run.checkpoint_interval"),
)


def settings_page(formatter: argparse.HelpFormatter) -> str:
    """Format help on the settings of a file, as section.name=TYPE, like that of flags."""
    schedule = replace(SCHEDULE_FLAG, name="name")
    flags = [
        Flag("model.name", str, "", "a name of docs/training/models.md, or family and sizes"),
        *(
            replace(flag, name=f"{flag.section}.{flag.name}")
            for flag in (schedule if flag is SCHEDULE_FLAG else flag for flag in setting_flags())
        ),
    ]
    for title, those in grouped(flags, MOST_USED).items():
        formatter.start_section(f"{title} settings" if title == "most used" else title)
        for flag in those:
            shown = argparse.Action([f"{flag.name}={flag.kind}"], flag.name, 0, help=flag.shown)
            formatter.add_argument(shown)
        formatter.end_section()
    return "\n" + formatter.format_help()


def assemble(given: Mapping[str, Any], model: Mapping[str, Any]) -> Config:
    """Make a configuration from a model and settings by name. Raises RequestError.

    model: name and sizes. Settings that are not given have their defaults.
    """

    def part(section: type) -> dict[str, Any]:
        return {one.name: given[one.name] for one in settings(section) if one.name in given}

    schedule = {"name": given["schedule"]} if "schedule" in given else {}
    data = DataConfig(**part(DataConfig))
    sizes = _reaching(model["sizes"], data.seq_length)
    return Config(
        model=ModelConfig(**{**model, "sizes": sizes}, **part(ModelConfig)),
        data=data,
        optim=OptimConfig(
            schedule=ScheduleConfig(**schedule, **part(ScheduleConfig)), **part(OptimConfig)
        ),
        parallel=ParallelConfig(**part(ParallelConfig)),
        run=RunConfig(**part(RunConfig)),
    )


def _reaching(sizes: Sizes, length: int) -> Sizes:
    """Raise a model's context to the length that it is trained on; no angle depends on it."""
    context = getattr(sizes, "context", length)  # Mamba has no limit
    changed: dict[str, Any] = {"context": length}
    return replace(sizes, **changed) if context < length else sizes


@dataclass(frozen=True)
class FlagAlias:
    """A system's flag that stands for one of our settings, under another name or default."""

    name: str
    setting: str
    default: Any
    aliases: tuple[str, ...] = ()


def with_ours(
    own: Iterable[Flag], known: Sequence[FlagAlias], taken: Collection[str]
) -> tuple[Flag, ...]:
    """Return a system's own flags, its aliases of settings, and flags for all other settings.

    taken: settings that the system's own flags stand for, which get no flag here.
    """
    by_setting = {flag.name: flag for flag in setting_flags()}
    as_known = [
        replace(
            by_setting.pop(one.setting), name=one.name, default=one.default, aliases=one.aliases
        )
        for one in known
    ]
    return (*own, *as_known, *(flag for name, flag in by_setting.items() if name not in taken))


def settings_of(given: Mapping[str, Any], known: Sequence[FlagAlias]) -> dict[str, Any]:
    """Return the given values by the names of our settings."""
    names = {one.name: one.setting for one in known}
    return {names.get(name, name): value for name, value in given.items()}


def names_of(known: Sequence[FlagAlias], **others: str) -> dict[str, str]:
    """Map our names, as errors use them, to the flags that were meant."""
    return {**{one.setting: one.name for one in known}, **others}
