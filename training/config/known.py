"""Flags of other systems that are settings of ours, which their doors share. Light: no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.config.assemble import flags
from training.config.flags import Flag


@dataclass(frozen=True)
class Known:
    """A flag of a system that is a setting of ours: under another name, or another default."""

    name: str
    setting: str
    default: Any
    aliases: tuple[str, ...] = ()


def with_ours(
    own: Iterable[Flag], known: Sequence[Known], taken: Collection[str]
) -> tuple[Flag, ...]:
    """Give a system's own flags, those that are settings, and all settings that it has none for.

    `taken` are the settings that flags of its own stand for.
    """
    by_setting = {flag.name: flag for flag in flags({})}
    as_known = [
        replace(
            by_setting.pop(one.setting), name=one.name, default=one.default, aliases=one.aliases
        )
        for one in known
    ]
    return (*own, *as_known, *(flag for name, flag in by_setting.items() if name not in taken))


def settings_of(given: Mapping[str, Any], known: Sequence[Known]) -> dict[str, Any]:
    """Give what was given by the names of our settings."""
    names = {one.name: one.setting for one in known}
    return {names.get(name, name): value for name, value in given.items()}


def names_of(known: Sequence[Known], **others: str) -> dict[str, str]:
    """Give what errors call by our names -> the flag that was meant."""
    return {**{one.setting: one.name for one in known}, **others}


def wrong_choices(given: Mapping[str, Any], choices: Mapping[str, Collection[str]]) -> list[str]:
    """List the flags that were given, or are by default, none of their values."""
    return [
        f"--{name}: must be one of {', '.join(known)}, not {given[name]!r}"
        for name, known in choices.items()
        if given[name] is not None and given[name] not in known
    ]
