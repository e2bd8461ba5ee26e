"""Read recipe files, merge them over the recipes that they extend, and validate the result.

All faults of a recipe are reported at once, each with its path and line in the file and with the
allowed values.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sqshforge import platforms
from sqshforge.errors import RequestError
from sqshforge.recipe import recipe_file
from sqshforge.recipe.schema import Recipe
from sqshforge.recipe.words import normalize, put_in

# Paths of keys whose values may contain parameters; * is any key. For images see `Recipe.tagged`.
FILLED = (("python", "version"), ("env", "*"), ("smoke", "train", "dataset"))

DEBIAN = re.compile(r"([a-z0-9][a-z0-9+.-]+)=[^=]")  # a pinned package


def extended(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a recipe's data over that of the recipe it extends.

    Mappings are merged key by key. Lists are appended to the parent's; an entry for a package that
    the parent also names replaces the parent's. `null` removes the parent's value, which leaves
    the default.
    """
    whole = dict(parent)
    for key, value in child.items():
        before = whole.get(key)
        if value is None:
            whole.pop(key, None)
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            whole[key] = extended(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            whole[key] = _joined(before, value)
        else:
            whole[key] = value
    return whole


def _joined(parent: Sequence[Any], child: Sequence[Any]) -> list[Any]:
    """Return the parent's entries, except those that the child replaces, then the child's."""
    own = {_entry_name(entry) for entry in child}
    return [*(entry for entry in parent if _entry_name(entry) not in own), *child]


def _entry_name(entry: Any) -> str:
    """Return the key that identifies a list entry: its package's name, or the entry itself."""
    if isinstance(entry, Mapping):
        entry = entry.get("package", entry)
    if isinstance(entry, str) and "==" in entry:
        return normalize(entry)
    pinned = DEBIAN.match(entry) if isinstance(entry, str) else None
    return repr(pinned[1] if pinned else entry)


def schema() -> str:
    """Return the JSON Schema of recipes, for editors: the content of recipes/schema.json."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def targets(folder: Path) -> list[str]:
    """Return the names of all recipes, sorted; hidden files belong to editors and are ignored."""
    return sorted(path.stem for path in folder.glob("[!.]*.yaml"))


def find(
    target: str,
    folder: Path,
    values: Mapping[str, str] | None = None,
    platform: str | None = None,
) -> Recipe:
    """Load a target's recipe for a platform, with `values` in place of its parameters' own.

    Without `platform`, it is this machine's if the recipe has it, else the recipe's first.
    Raises `RequestError` for an unknown target or parameter, and for a platform that the recipe
    does not have.
    """
    path = _file(target, folder, where=str(folder))
    recipe = load(path, platform)
    unknown = sorted(set(values or {}) - set(recipe.parameters))
    if unknown:
        known = ", ".join(sorted(recipe.parameters)) or "it has none"
        raise RequestError(
            f"no parameter {', '.join(unknown)}; parameters: {known}",
            where=f"--set, for recipes/{target}.yaml",
            fix="--set NAME=VALUE",
        )
    return _load(path, (), values, platform)[0] if values else recipe


def platforms_of(target: str, folder: Path) -> tuple[str, ...]:
    """Return a target's platforms, in the order of its recipe."""
    path = _file(target, folder, where=str(folder))
    load(path)
    return tuple(_load(path, ())[1].get("platforms", (platforms.DEFAULT.name,)))


def on_platform(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a recipe's data for one platform, with its `per_platform` keys merged in."""
    whole = {key: value for key, value in data.items() if key != "per_platform"}
    other = (data.get("per_platform") or {}).get(name) or {}
    return extended({**whole, "platforms": [name]}, other)


def filled(data: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe's data with parameters substituted wherever allowed, except in images.

    `values` override the recipe's own. Raises `ValueError` for an undefined parameter.
    """
    own = data.get("parameters")
    known = {**(own if isinstance(own, Mapping) else {}), **values}
    whole = {**data, "parameters": known} if values else dict(data)
    if all(isinstance(value, str) for value in known.values()):  # else validation reports that
        for keys in FILLED:
            whole = _put(whole, keys, known)
    return whole


def _put(
    data: Mapping[str, Any], keys: Sequence[str], values: Mapping[str, str], above: str = ""
) -> dict[str, Any]:
    """Return a mapping with parameters substituted in the text at a path of keys, if any."""
    whole = dict(data)
    for key in list(whole) if keys[0] == "*" else [keys[0]]:
        value = whole.get(key)
        if len(keys) > 1 and isinstance(value, Mapping):
            whole[key] = _put(value, keys[1:], values, f"{above}{key}.")
        elif len(keys) == 1 and isinstance(value, str):
            try:
                whole[key] = put_in(value, values)
            except ValueError as error:
                raise ValueError(f"{above}{key}: {error}") from None
    return whole


def ancestors(recipe: Recipe, folder: Path) -> list[Recipe]:
    """Return the recipes that a recipe extends, nearest first."""
    found = []
    while recipe.extends is not None:
        recipe = find(recipe.extends, folder)
        found.append(recipe)
    return found


def load(path: Path, platform: str | None = None) -> Recipe:
    """Read and validate a recipe file and those that it extends; `platform` is as in `find`.

    Raises `RequestError` with every fault of the file: broken YAML, unknown keys, wrong values.
    """
    return _load(path, (), None, platform)[0]


def whole(path: Path, values: Mapping[str, str] | None = None, platform: str | None = None) -> str:
    """Return a recipe's text, complete in itself.

    A recipe that extends another, has parameters or differs by platform is written as merged YAML,
    with its parameters substituted; `values` override the recipe's own.
    """
    recipe, data = _load(path, (), values, platform)
    name = recipe.platform.name
    differs = name in data.get("per_platform", {})
    if recipe.extends is None and not recipe.parameters and not differs:
        return path.read_text()
    changes = [f"laid over what it extends: {recipe.extends}"] if recipe.extends else []
    changes += ["with its parameters"] if recipe.parameters else []
    changes += [f"for {name}"] if differs else []
    data = {key: value for key, value in data.items() if key != "extends"}
    data = filled(on_platform(data, name), values or {})
    opening = f"# {path.name}, {', '.join(changes)}\n"
    return opening + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _file(target: str, folder: Path, where: str) -> Path:
    known = targets(folder)
    if target not in known:
        near = difflib.get_close_matches(target, known, n=1)
        raise RequestError(
            f"unknown target {target!r}",
            where=where,
            fix=f"did you mean {near[0]}?" if near else f"targets are: {', '.join(known)}",
        )
    return folder / f"{target}.yaml"


def _load(
    path: Path,
    heirs: Sequence[str],
    values: Mapping[str, str] | None = None,
    platform: str | None = None,
) -> tuple[Recipe, dict[str, Any]]:
    """Load a recipe for a platform, and its data for all platforms without parameters substituted.

    `heirs` are the recipes that extend it, the requested one first; `values` are parameters.
    """
    node, data = recipe_file.read(path)
    faults = [f"{where}: {what}" for where, what in recipe_file.repeated(node)]
    parent = data.get("extends")
    if isinstance(parent, str):
        chain = (*heirs, path.stem)
        if parent in chain:
            raise RequestError(
                f"the recipe extends itself: {' -> '.join((*chain, parent))}",
                where=f"{path}, extends",
                fix="remove extends from one of them",
            )
        _, inherited = _load(_file(parent, path.parent, f"{path}, extends"), chain)
        template = inherited.get("template", parent)
        data = extended({**inherited, "template": template}, data)
    recipe, wrong = _checked(data, node, values or {})
    faults += wrong
    found: dict[str, Recipe | None] = {}
    if recipe is not None:
        if recipe.target != path.stem:
            faults.append(f"target: is {recipe.target!r}, and the file's name says {path.stem!r}")
        other = _below(node, "per_platform")
        for name in recipe.platforms:
            laid = on_platform(data, name)
            found[name], wrong = _checked(laid, _below(other, name), values or {})
            faults += [f"per_platform.{name}.{one}" for one in wrong]
    if faults or recipe is None:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise RequestError(
            f"the recipe has {count}:" + "".join(f"\n    {fault}" for fault in faults),
            where=str(path),
            fix="docs/images/recipes.md explains every key; recipes/schema.json serves editors",
        )
    if platform is not None and platform not in recipe.platforms:
        raise RequestError(
            f"{recipe.target} is not made for {platform}",
            where=f"{path}, platforms",
            fix=f"--platform {' or '.join(recipe.platforms)}, or add it there: "
            "docs/images/recipes.md",
        )
    chosen = found[platform or platforms.preferred(recipe.platforms)]
    assert chosen is not None  # there were no faults
    return chosen, data


def _checked(
    data: Mapping[str, Any], node: yaml.Node | None, values: Mapping[str, str]
) -> tuple[Recipe | None, list[str]]:
    """Validate a recipe's data; return the recipe or its faults. `node` is its YAML node."""
    try:
        return Recipe.model_validate(filled(data, values)), []
    except ValidationError as error:
        return None, [_described(fault, node, data) for fault in error.errors()]
    except ValueError as error:
        return None, [str(error)]


def _below(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return the value at a key of a mapping; None without one."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)


def _described(fault: ErrorDetails, node: yaml.Node | None, data: Mapping[str, Any]) -> str:
    """Describe a fault: its path and line, what is wrong, what is allowed.

    `data` is the validated data: the file's own, merged over what it extends.
    """
    steps = fault["loc"]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    line, spot = _place(node, data, steps)
    place = f"{path.lstrip('.')}" + (f" (line {line})" if line else "")
    context: dict[str, Any] = fault.get("ctx", {})
    unquoted = _unquoted(spot, fault)
    if unquoted is not None:
        return f"{place}: {unquoted}"
    match fault["type"]:
        case "extra_forbidden":
            allowed = _keys_at(steps[:-1])
            near = difflib.get_close_matches(str(steps[-1]), allowed, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            what = f"unknown key; {hint}allowed: {', '.join(allowed)}"
        case "missing":
            what = "is missing"
        case "literal_error":
            what = f"is {fault['input']!r}; allowed: {context['expected']}"
        case "string_pattern_mismatch":
            what = f"is {fault['input']!r}; must match {context['pattern']}"
        case "value_error":
            what = str(context["error"])
        case _:
            what = f"is {fault['input']!r}; {fault['msg']}"
    return f"{place}: {what}"


def _place(
    node: yaml.Node | None, data: object, steps: Sequence[int | str]
) -> tuple[int | None, yaml.Node | None]:
    """Return the line of the deepest step found in the file, and the node if all steps are."""
    line = None
    for step in steps:
        if isinstance(node, yaml.MappingNode) and isinstance(data, Mapping):
            pairs = [(k, v) for k, v in node.value if k.value == step]
            if not pairs:
                return line, None
            key, node = pairs[-1]
            line, data = key.start_mark.line + 1, data.get(step)
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(data, list) and isinstance(step, int)
        ):
            own = step - (len(data) - len(node.value))  # inherited entries come first
            if own < 0:
                return line, None
            node, data = node.value[own], data[step]
            line = node.start_mark.line + 1
        else:
            return line, None
    return line, node


def _unquoted(node: yaml.Node | None, fault: ErrorDetails) -> str | None:
    """Explain unquoted text that YAML reads as another type, usually a version such as 3.10."""
    given = fault["input"]
    if not isinstance(node, yaml.ScalarNode) or given is None or isinstance(given, str):
        return None
    text = node.value
    wanted = fault.get("ctx", {}).get("expected", "")
    if fault["type"] != "string_type" and f"'{text}'" not in wanted:
        return None
    kind = "a truth value" if isinstance(given, bool) else "a date"
    if isinstance(given, int | float) and not isinstance(given, bool):
        kind = "a number"
    other = "" if str(given) == text else f" ({given})"
    return f'is {text}, {kind} in YAML{other}; quote it: "{text}"'


def _keys_at(steps: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the schema allows at a place."""
    spot: dict[str, Any] = Recipe.model_json_schema()
    definitions = spot["$defs"]

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        for option in part.get("anyOf", []) + part.get("allOf", []):
            if "$ref" in option:
                part = option
        return definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    for step in steps:
        named = {} if isinstance(step, int) else spot.get("properties", {})
        others = [*spot.get("patternProperties", {}).values(), spot.get("items", {})]
        spot = resolved(named.get(step, others[0]))
    return sorted(spot.get("properties", {}))
