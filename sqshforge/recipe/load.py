"""Recipe files: read, laid over what they extend, and checked before anything is done.

All faults of a recipe are reported at once, each with its path and line in the file and with
what would be allowed there.
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

# Where parameters stand beside images, for which see `Recipe.tagged`: key by key, * for any.
FILLED = (("python", "version"), ("env", "*"), ("smoke", "train", "dataset"))

DEBIAN = re.compile(r"([a-z0-9][a-z0-9+.-]+)=[^=]")  # a pinned package


def extended(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe is that extends another.

    Mappings are laid over each other. Lists add to the parent's; an entry for a package that the
    parent names takes its place. `null` takes the parent's value away, so that the default holds.
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
    """The parent's entries, less those that the child pins otherwise, and then the child's."""
    own = {_entry_name(entry) for entry in child}
    return [*(entry for entry in parent if _entry_name(entry) not in own), *child]


def _entry_name(entry: Any) -> str:
    """What an entry of a list is about: a package's name, or the entry itself."""
    if isinstance(entry, Mapping):
        entry = entry.get("package", entry)
    if isinstance(entry, str) and "==" in entry:
        return normalize(entry)
    pinned = DEBIAN.match(entry) if isinstance(entry, str) else None
    return repr(pinned[1] if pinned else entry)


def schema() -> str:
    """The JSON Schema of recipes, for editors, as recipes/schema.json holds it."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def targets(folder: Path) -> list[str]:
    """The names of all recipes, sorted; hidden files are those of editors."""
    return sorted(path.stem for path in folder.glob("[!.]*.yaml"))


def find(
    target: str,
    folder: Path,
    values: Mapping[str, str] | None = None,
    platform: str | None = None,
) -> Recipe:
    """The recipe of a target for a platform, with these values of its parameters for its own.

    Without a platform it is this machine's own where the recipe has that, else the recipe's first.
    Raises `RequestError` for a name that is no target, for one that is no parameter, and for a
    platform that the recipe does not have.
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
    """The platforms that a target has, the first one first."""
    path = _file(target, folder, where=str(folder))
    load(path)
    return tuple(_load(path, ())[1].get("platforms", (platforms.DEFAULT.name,)))


def on_platform(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A recipe's data for one platform alone, with what is other there laid over."""
    whole = {key: value for key, value in data.items() if key != "per_platform"}
    other = (data.get("per_platform") or {}).get(name) or {}
    return extended({**whole, "platforms": [name]}, other)


def filled(data: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """A recipe's data with parameters put in where they may stand, images left out.

    `values` go before the recipe's own. Raises `ValueError` for a parameter that there is not.
    """
    own = data.get("parameters")
    known = {**(own if isinstance(own, Mapping) else {}), **values}
    whole = {**data, "parameters": known} if values else dict(data)
    if all(isinstance(value, str) for value in known.values()):  # else that is the fault to tell
        for keys in FILLED:
            whole = _put(whole, keys, known)
    return whole


def _put(
    data: Mapping[str, Any], keys: Sequence[str], values: Mapping[str, str], above: str = ""
) -> dict[str, Any]:
    """A mapping with parameters put into the text at a path of keys, where there is one."""
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
    """The recipes that a recipe extends, the nearest first."""
    found = []
    while recipe.extends is not None:
        recipe = find(recipe.extends, folder)
        found.append(recipe)
    return found


def load(path: Path, platform: str | None = None) -> Recipe:
    """Read and check one recipe file, with all that it extends, for a platform as `find` does.

    Raises `RequestError` with every fault of the file: broken YAML, unknown keys, wrong values.
    """
    return _load(path, (), None, platform)[0]


def whole(path: Path, values: Mapping[str, str] | None = None, platform: str | None = None) -> str:
    """A recipe's text; the YAML of all together, where another is extended or platforms differ.

    The parameters are put in, with these values in place of the recipe's own.
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
    """A recipe for a platform, and its data for all, into which no parameters are put.

    `heirs` are those that extend it, the one asked for first; `values` are parameters.
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
    assert chosen is not None  # it has no faults
    return chosen, data


def _checked(
    data: Mapping[str, Any], node: yaml.Node | None, values: Mapping[str, str]
) -> tuple[Recipe | None, list[str]]:
    """A recipe's data as a recipe, or what is wrong with it; `node` is where that stands."""
    try:
        return Recipe.model_validate(filled(data, values)), []
    except ValidationError as error:
        return None, [_described(fault, node, data) for fault in error.errors()]
    except ValueError as error:
        return None, [str(error)]


def _below(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """What a mapping has at a key."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)


def _described(fault: ErrorDetails, node: yaml.Node | None, data: Mapping[str, Any]) -> str:
    """One fault in words: its path and line, what is wrong, what is allowed.

    `data` is what was checked: the file's own, laid over what it extends.
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
    """The line of the deepest step that is in the file, and its node where all steps are."""
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
            own = step - (len(data) - len(node.value))  # those of what it extends come first
            if own < 0:
                return line, None
            node, data = node.value[own], data[step]
            line = node.start_mark.line + 1
        else:
            return line, None
    return line, node


def _unquoted(node: yaml.Node | None, fault: ErrorDetails) -> str | None:
    """What to say of text that YAML takes for something else: a version such as 3.10, mostly."""
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
    """The keys that are allowed at a place of the schema."""
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
