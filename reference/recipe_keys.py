"""docs/reference/recipe-keys.md: every key of a recipe, from its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reference.markdown import code, first_sentence, page, prose, table
from sqshforge.recipe.schema import Recipe

Node = Mapping[str, Any]
WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "object": "mapping",
}


def text() -> str:
    schema = Recipe.model_json_schema()
    rows = list(_keys(schema, schema.get("$defs", {}), ""))
    return page(
        "The keys of a recipe",
        "sqshforge/recipe/",
        "`sqshforge schema` prints them as a JSON Schema, with the pattern of each value. "
        "[recipes.md](../images/recipes.md) has what goes with what. `NAME` and `PLATFORM` stand "
        "for names of your own, `[]` for each entry of a list.",
        table(["key", "value", "default", "meaning"], rows),
    )


def _keys(node: Node, parts: Mapping[str, Node], place: str) -> Iterator[list[str]]:
    """Yield the rows of a mapping's keys and of those below them."""
    for name, entry in node["properties"].items():
        path = f"{place}{name}"
        value = _whole(entry, parts)
        default = "" if name not in node.get("required", ()) else "must be given"
        if "default" in entry and entry["default"] not in (None, [], {}):
            default = code(_shown(entry["default"]))
        if "properties" in value:
            default = default if default == "must be given" else ""
        meaning = entry.get("description") or first_sentence(value.get("description", ""))
        yield [code(path), _kind(value, parts), default, prose(meaning)]
        yield from _below(value, parts, path)


def _below(value: Node, parts: Mapping[str, Node], path: str) -> Iterator[list[str]]:
    values, items = _values(value, parts), _items(value, parts)
    for inner, place in ((value, ""), (values, ".NAME"), (items, "[]")):
        if "properties" in inner:
            yield from _keys(inner, parts, f"{path}{place}.")


def _values(mapping: Node, parts: Mapping[str, Node]) -> Node:
    """Return the schema of a mapping's values; empty if it has no free names, or allows any."""
    named = list(mapping.get("patternProperties", {}).values())
    inner = named[0] if len(named) == 1 else mapping.get("additionalProperties")
    return _whole(inner, parts) if isinstance(inner, Mapping) else {}


def _items(several: Node, parts: Mapping[str, Node]) -> Node:
    """Return the schema of a list's entries; empty if it is not a list."""
    return _whole(several.get("items", {}), parts)


def _whole(entry: Node, parts: Mapping[str, Node]) -> Node:
    """Return an entry's schema, following its reference, and for "null or another" the other."""
    choices = [one for one in entry.get("anyOf", ()) if one.get("type") != "null"]
    if len(choices) == 1:
        return _whole(choices[0], parts)
    if "$ref" in entry:
        return parts[entry["$ref"].rpartition("/")[2]]
    return entry


def _kind(value: Node, parts: Mapping[str, Node]) -> str:
    if "enum" in value:
        return ", ".join(code(_shown(one)) for one in value["enum"])
    if "const" in value:
        return code(_shown(value["const"]))
    if value.get("type") == "array":
        inner = _items(value, parts)
        return "list" if "properties" in inner else f"list of {_kind(inner, parts)}"
    inner = _values(value, parts)
    if inner and "properties" not in inner:
        return f"NAME: {_kind(inner, parts)}"
    bounds = [
        f"{words} {value[key]:g}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "more than"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "less than"),
        )
        if key in value
    ]
    return ", ".join([WORDS[value["type"]], *bounds])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
