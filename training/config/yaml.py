"""Configuration files: YAML with a section for the model, data, optim, schedule, parallel and run.

    model:    {name: llama2-7b}          a preset, or with sizes of its own: {name: ..., n_layer: 4}
    model:    {family: llama, d_model: ...}                                       or sizes alone
    data:     {dataset_path: ..., seq_length: 4096}
    schedule: {name: cosine, warmup: 0.01}

Settings given after the file, as key=value, override it: run.num_steps=100, or num_steps=100, as no
two sections have a key in common; schedule=cosine is schedule.name=cosine. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from training.config import yaml_file
from training.config.config import Config
from training.config.flags import SECTIONS, assemble
from training.config.setting import READ, Setting, named
from training.errors import RequestError
from training.models import FAMILIES, RopeScaling, Sizes, preset

_ROPE = "rope_scaling"


@dataclass
class _Found:
    """What was read so far, and what is wrong with it."""

    settings: dict[str, Any] = field(default_factory=dict)  # of all sections; "schedule": its name
    model: dict[str, Any] = field(default_factory=dict)  # name, family and sizes
    faults: list[str] = field(default_factory=list)


def load(path: Path, changes: Sequence[str]) -> Config:
    """Read a file, and changes to it. Raises RequestError listing every fault with its place."""
    found = _Found()
    for section, given in _parse(path).items():
        where = f"{path}: {section}"
        if section not in SECTIONS:
            found.faults.append(f"{where}: there is no such section{near(str(section), SECTIONS)}")
        elif not isinstance(given or {}, Mapping):
            found.faults.append(f"{where}: must be a list of settings, name: value")
        else:
            for name, value in (given or {}).items():
                _take(found, section, str(name), value, f"{where}.{name}")
    for change in changes:
        _change(found, change)
    model = _model(found)
    if found.faults:
        raise RequestError.of(found.faults)
    return assemble(found.settings, model)


def _parse(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml_file.read(path, f"--config: {path}")
    except OSError as error:
        raise RequestError(f"--config: {path} cannot be read: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise RequestError(f"--config: {path} must have sections: {', '.join(SECTIONS)}")
    return content


def _change(found: _Found, change: str) -> None:
    """Apply one key=value of the command line; the key may omit its section."""
    key, equals, text = change.partition("=")
    if not equals or key.startswith("-"):
        found.faults.append(
            f"{change!r} is not a change of a setting; fix: write section.name=value"
        )
        return
    value = yaml_file.value(text) if text else ""
    if key == "schedule":  # as errors and the table of settings call it
        key = "schedule.name"
    section, dot, name = key.rpartition(".")
    if not dot:
        section = next((one for one, kind in SECTIONS.items() if name in named(kind)), "")
        if not section or name == "name":
            of_model = {"family", *(one.name for kind in FAMILIES.values() for one in fields(kind))}
            known = {name: None for kind in SECTIONS.values() for name in named(kind)}
            hint = f"; fix: write model.{change}" if key in of_model else near(key, known)
            found.faults.append(f"{key}: there is no such setting{hint}")
            return
    if section not in SECTIONS:
        found.faults.append(f"{key}: there is no section {section!r}{near(section, SECTIONS)}")
        return
    # A text is taken literally: a folder may be called 1e3, a tokenizer 2024.
    setting = named(SECTIONS[section]).get(name)
    _take(found, section, name, text if setting and setting.is_text else value, key)


def _take(found: _Found, section: str, name: str, value: Any, where: str) -> None:
    known = named(SECTIONS[section])
    if section == "schedule" and name == "name":
        found.settings["schedule"] = str(value)
    elif name in known:
        try:
            found.settings[name] = value_of(known[name], value)
        except ValueError as error:
            found.faults.append(f"{where}: must be {error}, not {value!r}")
    elif section == "model":
        found.model[name] = value  # checked once the family is known
    else:
        owner = next((one for one, kind in SECTIONS.items() if name in named(kind)), "")
        hint = f"; it belongs to {owner}" if owner else near(name, known)
        found.faults.append(f"{where}: there is no such setting{hint}")


def value_of(setting: Setting, value: Any) -> Any:
    """Convert a value of YAML to a setting's type, reading text like a flag's.

    Raises ValueError saying what it must be. YAML reads 3e-4, without a point, as text.
    """
    if setting.is_text:
        if not isinstance(value, str):
            raise ValueError("text")
        return setting.read(value)
    if isinstance(value, bool) and setting.read not in (READ["bool"], READ["bool | None"]):
        raise ValueError("a whole number" if setting.read is READ["int"] else "a number")
    return setting.read(str(value))


def _model(found: _Found) -> dict[str, Any]:
    """Make the model's name and sizes from what was given; add faults to `found`."""
    given = dict(found.model)
    name, family = given.pop("name", ""), str(given.pop("family", None) or "")
    try:
        if name:
            start = preset(str(name))
            kind: type[Sizes] = type(start)
            if family and family != kind.family:
                found.faults.append(f"model.family: {name} is of family {kind.family}")
        elif family in FAMILIES:
            kind = FAMILIES[family]
        else:
            wrong = f"there is no family {family!r}{near(family, FAMILIES)}"
            found.faults.append(
                f"model.family: {wrong} (known: {', '.join(FAMILIES)})"
                if family
                else "model: name, or family and sizes, must be given"
            )
            return {}
        sizes = _sizes(kind, given, found)
        found.faults += [
            f"model.{one.name}: must be given, as there is no model.name to take it from"
            for one in fields(kind)
            if one.default is MISSING and one.name not in given and not name
        ]
        if found.faults:
            return {}
        made = replace(start, **sizes) if name else kind(**sizes)
    except RequestError as error:
        found.faults.append(str(error))
        return {}
    return {"name": str(name or family), "sizes": made}


def _sizes(kind: type[Sizes], given: Mapping[str, Any], found: _Found) -> dict[str, Any]:
    known = {one.name: one for one in fields(kind)}
    sizes: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            found.faults.append(f"model.{name}: {kind.family} has no such size{near(name, known)}")
        elif name == _ROPE and isinstance(value, Mapping):
            try:
                sizes[name] = RopeScaling.of(value)
            except RequestError as error:
                found.faults += [f"model.{fault}" for fault in error.faults]
        elif name == _ROPE and value is None:
            sizes[name] = None
        else:
            try:
                sizes[name] = READ[str(known[name].type)](str(value))
            except (KeyError, ValueError) as error:
                must = error if isinstance(error, ValueError) else "kind, factor and so on"
                found.faults.append(f"model.{name}: must be {must}, not {value!r}")
    return sizes


def near(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the end of an error that suggests the nearest known name; empty if none is near."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""
