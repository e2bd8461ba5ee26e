"""Reads and writes config.yaml. No torch needed here.

Sections and keys are those of training.systems.composer.config. text_paths and code_paths are
lists of {path, weight, order}, where order is optional; eval_paths is one of {path, label}, where
the label defaults to the file's name up to its first dot. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from training.cli import with_home
from training.config import yaml_file
from training.config.setting import named, number_of
from training.config.yaml import near, value_of
from training.errors import RequestError, writing
from training.systems.composer.config import ComposerConfig, DataSection, HeldOut, Part

SECTIONS: dict[str, type] = {
    field.name: field.default_factory  # type: ignore[misc]
    for field in fields(ComposerConfig)
}
_SHARES = ("code_percentage", "text_percentage")
_LISTS: dict[str, type] = {"text_paths": Part, "code_paths": Part, "eval_paths": HeldOut}


def read(path: Path, changes: Sequence[str] = ()) -> ComposerConfig:
    """Read a file, and changes to it. Raises RequestError listing every fault with its place.

    A change is section.key=value, with the value as it would be in the file.
    """
    faults: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    for section, given in _changed(_parsed(path), changes).items():
        if section not in SECTIONS:
            faults.append(f"{section}: there is no such section{near(str(section), SECTIONS)}")
        elif not isinstance(given or {}, Mapping):
            faults.append(f"{section}: must be a list of settings, name: value")
        else:
            found[section] = _section(section, given or {}, faults)
    if not any(fault.startswith(f"data.{name}:") for fault in faults for name in _LISTS):
        # Checks of data that could not be read would report faults that are none.
        try:
            made = ComposerConfig(**{n: SECTIONS[n](**values) for n, values in found.items()})
        except RequestError as error:
            lines = [line for line in str(error).splitlines() if not line.endswith(" faults")]
            faults += [line.removeprefix("  - ") for line in lines]
    if faults:
        raise RequestError.of([f"{path}: {fault}" for fault in dict.fromkeys(faults)])
    return made


def write(config: ComposerConfig, path: Path) -> None:
    """Write a configuration with every key. Raises TrainingError if it cannot."""
    import yaml

    content = dataclasses.asdict(config)
    data = content["data"]
    for name in _LISTS:
        data[name] = list(data[name])
    for name in _SHARES:
        if data[name] is None:
            del data[name]
    content["trainer"]["cp_interval"] = config.trainer.save_interval
    content["fsdp"]["process_group"] = config.fsdp.process_group or None
    with writing(path):
        path.write_text(yaml.safe_dump(content, sort_keys=False))


def label_of(path: str) -> str:
    """Return the default label of held-out files."""
    return Path(path).name.partition(".")[0]


def _parsed(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml_file.read(path, str(path))
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror}; fix: write one, with every key, by "
            "python -m training.create_mamba_config"
        ) from error
    if not isinstance(content, Mapping):
        raise RequestError(f"{path} must have sections: {', '.join(SECTIONS)}")
    return content


def _changed(content: Mapping[Any, Any], changes: Sequence[str]) -> Mapping[Any, Any]:
    """Apply changes to what a file says. Raises RequestError for a malformed one."""
    found = {
        name: dict(given) if isinstance(given, Mapping) else given
        for name, given in content.items()
    }
    changed = {change.partition("=")[0] for change in changes}
    if "trainer.save_interval" in changed and isinstance(found.get("trainer"), dict):
        found["trainer"].pop("cp_interval", None)  # a synonym; a change of it still counts
    for change in changes:
        place, equals, text = change.partition("=")
        section, dot, key = place.partition(".")
        if not (equals and dot and key) or section.startswith("-"):
            raise RequestError(
                f"{change!r} is not a change of a setting; fix: write section.name=value"
            )
        if not isinstance(found.setdefault(section, {}) or {}, Mapping):
            continue  # the section itself is wrong, which is reported
        known = named(SECTIONS[section]) if section in SECTIONS else {}
        value = yaml_file.value(text)
        # Texts are taken as they are written: a folder may be called 1e3. But null is empty.
        if key in known and known[key].is_text and not (value is None and known[key].default == ""):
            value = text
        found[section] = {**(found[section] or {}), key: value}
    return found


def _section(section: str, given: Mapping[Any, Any], faults: list[str]) -> dict[str, Any]:
    """Read the keys of a section; wrong values are reported and left out."""
    known = named(SECTIONS[section])
    found: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{section}.{name}"
        is_data = SECTIONS[section] is DataSection
        if is_data and name in _LISTS:
            found[name] = _entries(_LISTS[name], value, where, faults)
        elif is_data and name in _SHARES:
            try:
                found[name] = number_of(value)
            except ValueError as error:
                faults.append(f"{where}: must be {error}, not {value!r}")
        elif name not in known:
            every = [*known, *(_LISTS if is_data else ())]
            faults.append(f"{where}: there is no such setting{near(str(name), every)}")
        else:
            try:
                empty = value is None and known[name].default == ""
                found[name] = "" if empty else value_of(known[name], value)
            except ValueError as error:
                faults.append(f"{where}: must be {error}, not {value!r}")
    return found


def _entries(kind: type, value: Any, where: str, faults: list[str]) -> tuple[Any, ...]:
    """Read a list of Parts or HeldOuts."""
    names = [field.name for field in fields(kind)]
    if not isinstance(value, list):
        faults.append(f"{where}: must be a list of {', '.join(names)}")
        return ()
    found: list[Any] = []
    for number, entry in enumerate(value, 1):
        place = f"{where}: entry {number}"
        if not isinstance(entry, Mapping) or not {"path"} <= entry.keys() <= set(names):
            faults.append(f"{place}: must have path, and no keys but {', '.join(names)}")
            continue
        if not isinstance(entry["path"], str) or not entry["path"]:
            faults.append(f"{place}: path must be text, not {entry['path']!r}")
            continue
        try:
            entry = {**entry, "path": with_home(entry["path"])}
        except ValueError as error:
            faults.append(f"{place}: path must be {error}, not {entry['path']!r}")
            continue
        if kind is HeldOut:
            label = entry.get("label") or label_of(entry["path"])
            found.append(HeldOut(path=entry["path"], label=str(label)))
            continue
        order = entry.get("order", 0)
        try:
            weight = number_of(entry.get("weight"))
        except ValueError:
            weight = None
        if weight is None or type(order) is not int:
            faults.append(f"{place}: weight must be a number, and order a whole number")
        else:
            found.append(Part(path=entry["path"], weight=weight, order=order))
    return tuple(found)
