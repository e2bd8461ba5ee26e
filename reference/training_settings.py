"""docs/reference/settings.md: every setting of `python -m training --config FILE`, by section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from reference.markdown import code, page, prose, table
from training.config.flags import SCHEDULE_FLAG, SECTIONS, TITLES, Flag, setting_flags
from training.config.setting import Setting, settings
from training.models import FAMILIES

KINDS = {"INT": "whole number", "FLOAT": "number", "BOOL": "`true`, `false`", "TEXT": "text"}
HEAD = ["setting", "value", "default", "meaning"]


def text() -> str:
    return page(
        "The settings of a run",
        "training/config/sections.py",
        "`python -m training --config FILE [section.setting=value ...]` takes them, and the entry "
        "points of the systems as flags, `--setting=value`, some under the names of their systems "
        "([training.md](../training/training.md)). `auto` is what the code chooses.",
        *(block for name in SECTIONS for block in _section(name)),
        "## Sizes of a model, by family",
        "`model.name` is a preset of [models.md](../training/models.md), beside which some of its "
        "sizes may be given; or `model.family` and all sizes that have no default.",
        table(["family", "sizes"], ([code(name), _sizes(one)] for name, one in _families())),
    )


def _section(name: str) -> Iterator[str]:
    yield f"## {name}: {TITLES[name]}" if name != TITLES[name] else f"## {name}"
    flags = {flag.name: flag for flag in setting_flags() if flag.section == name}
    known = {one.name: one for one in settings(SECTIONS[name])}
    rows = []
    if name == "model":
        rows.append([code("model.name"), "text", "", prose("the preset")])
        rows.append([code("model.family"), _choices(FAMILIES), "", "the family, with sizes"])
    for flag in flags.values():
        own = "name" if flag is SCHEDULE_FLAG else flag.name
        default = _default(flag, known.get(flag.name))
        value = _value(flag, known.get(flag.name))
        rows.append([code(f"{name}.{own}"), value, default, prose(flag.help)])
    yield table(HEAD, rows)


def _value(flag: Flag, setting: Setting | None) -> str:
    if flag.choices:
        return _choices(flag.choices)
    kind = KINDS[flag.kind]
    about = setting.about if setting else None
    if about and about.least is not None:
        kind += f", at least {about.least:g}"
    if about and about.above is not None:
        kind += f", more than {about.above:g}"
    if flag.default is None:
        kind += ", `auto`"
    return kind


def _choices(names: Any) -> str:
    return ", ".join(map(code, names))


def _default(flag: Flag, setting: Setting | None) -> str:
    if setting and setting.about.needed:
        return "must be given"
    if flag.default is None:
        return code("auto")
    if isinstance(flag.default, bool):
        return code(str(flag.default).lower())
    return code(str(flag.default))


def _families() -> list[tuple[str, type]]:
    return list(FAMILIES.items())


def _sizes(family: type) -> str:
    shown = []
    for field in dataclasses.fields(family):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            shown.append(f"{code(field.name)} ({field.default})")
        elif field.default_factory is not dataclasses.MISSING:
            shown.append(f"{code(field.name)} (its own)")
        else:
            shown.append(code(field.name))
    return ", ".join(shown)
