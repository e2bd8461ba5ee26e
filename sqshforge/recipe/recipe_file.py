"""Read the YAML of a recipe file, without regard to its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sqshforge.errors import RequestError

# libyaml's loader, if PyYAML was built with it, is ten times as fast.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NESTING = 50  # depth of lists and mappings within each other


def read(path: Path) -> tuple[yaml.Node | None, dict[str, Any]]:
    """Read a file's YAML as nodes, which know their lines, and as data.

    Raises `RequestError` for a file that cannot be read, is not YAML or not a mapping, or is nested
    too deep or in itself.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise RequestError(
            f"the recipe cannot be read: {error.strerror}", where=str(path)
        ) from None
    except UnicodeDecodeError:
        raise RequestError("the recipe is not a text file (UTF-8)", where=str(path)) from None
    try:
        _refuse_deep(text, path)
        node = yaml.compose(text, Loader=LOADER)
        data = yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise _broken(path, error) from None
    if not isinstance(data, dict):
        raise RequestError(
            "a recipe is a mapping of keys to values, and this file is not one",
            where=str(path),
            fix="start from recipes/cpu-mamba.yaml; docs/images/recipes.md explains every key",
        )
    return node, data


def _refuse_deep(text: str, path: Path) -> None:
    """Refuse YAML nested in itself, or so deep that composing its nodes would crash Python."""
    around: list[str | None] = []  # anchors of the open lists and mappings
    events: Any = yaml.parse(text, Loader=LOADER)
    for event in events:
        where = f"{path}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in around:
            raise RequestError(
                f"an alias stands within what it names: {event.anchor}",
                where=where,
                fix="write out what is meant there",
            )
        if len(around) > NESTING:
            raise RequestError(
                f"the recipe has more than {NESTING} lists and mappings within each other",
                where=where,
            )


def _broken(path: Path, error: yaml.YAMLError | ValueError) -> RequestError:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return RequestError(f"the recipe is not valid YAML: {problem}", where=place)


def repeated(node: yaml.Node | None, path: str = "") -> list[tuple[str, str]]:
    """Return the keys that a mapping has twice: YAML itself would silently use the last."""
    faults: list[tuple[str, str]] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            here = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                faults.append((f"{here} (line {key.start_mark.line + 1})", "stands twice"))
            seen.add(key.value)
            faults += repeated(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            faults += repeated(value, f"{path}[{index}]")
    return faults
