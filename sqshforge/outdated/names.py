"""Read names and texts: the newest of many tags, a resolver's reason, a recipe's comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import yaml
from packaging.markers import Marker
from packaging.version import InvalidVersion, Version

from sqshforge.recipe import normalize

LONGEST = 300  # most characters shown of a resolver's reason
PYTHONS = range(6, 40)  # minor versions of Python 3 that a marker is tried with
LINUX = {"sys_platform": "linux", "os_name": "posix"}

Comments = Mapping[tuple[tuple[str, ...], str], str]


@dataclass(frozen=True)
class Offer:
    """A version in an index; `python` is the lowest that takes it, empty for the recipe's own."""

    version: str
    python: str = ""


def newest(pinned: str, names: Iterable[str]) -> str:
    """Return the newest of a repository's or image's tags or branches that is named like `pinned`.

    Such names are versions after the same prefix, such as v2.3.0 for v2.2.0.post1. If `pinned` is
    not a version, they differ from it only in numbers, such as v1.10.0-aws for v1.9.1-aws.
    Pre-releases count only if the pin is one. If none is newer, `pinned` itself is returned.
    """
    begin, version = _parted(pinned)
    if version is None:
        same = [one for one in names if _shape(one) == _shape(pinned)]
        return max([pinned, *same], key=_numbers)
    best = (version, pinned)
    for name in names:
        start, other = _parted(name)
        if other is None or start != begin or (other.is_prerelease and not version.is_prerelease):
            continue
        best = max(best, (other, name))
    return best[1]


def _parted(name: str) -> tuple[str, Version | None]:
    """Split a name before its first digit; the rest is a version, or None if it is not one."""
    begin, digits, rest = re.fullmatch(r"(\D*)(\d?)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        return begin, Version(digits + rest)
    except InvalidVersion:
        return begin, None


def _shape(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def parse_offers(text: str, python: str, machine: str) -> dict[str, tuple[Offer, ...]]:
    """Parse the output of `uv pip compile --universal`: each package's newest for each Python.

    `python` is the recipe's, such as "3.10", and `machine` its processor's name. Versions that no
    Python from there on takes, on Linux with that processor, are left out.
    """
    found: dict[str, tuple[Offer, ...]] = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)(?:\s*;\s*(.+))?$", line)
        if match is None:
            continue
        name, version, marker = normalize(match[1]), match[2], match[3]
        lowest = _lowest_python(marker, python, machine) if marker else ""
        if lowest is not None:
            found[name] = (*found.get(name, ()), Offer(version, lowest))
    return found


def _lowest_python(marker: str, python: str, machine: str) -> str | None:
    """Return the lowest Python for which a marker holds, from the recipe's on.

    Empty for the recipe's own; None if there is none.
    """
    own = int(python.partition(".")[2])
    for minor in PYTHONS:
        version = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
        facts = {**LINUX, "platform_machine": machine, **version}
        if minor >= own and Marker(marker).evaluate(facts):
            return "" if minor == own else f"3.{minor}"
    return None


def reason(said: str, tried: str) -> str:
    """Extract why uv rejected the requirement `tried`: the first reason that it gives."""
    said = re.sub("{[^{}]*}", "", said)  # markers
    text = " ".join(re.sub("[×╰─▶│]", " ", said).split())  # noqa: RUF001
    found = re.search(r"Because (.+?)(?:, we can conclude|\. |\.$|$)", text)
    first = found[1] if found else text
    first = first.replace(f" and you require {tried}", "").replace(f"you require {tried} and ", "")
    first = first.replace("you require", "the recipe has")
    return first if len(first) <= LONGEST else f"{first[:LONGEST]}..."


def comments(text: str) -> dict[tuple[tuple[str, ...], str], str]:
    """Return the comments beside a recipe's values, by a value's keys and the value itself.

    The entries of a list have the keys of the list.
    """
    lines = text.splitlines()
    found: dict[tuple[tuple[str, ...], str], str] = {}

    def walk(node: yaml.Node | None, keys: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                walk(value, (*keys, str(key.value)))
        elif isinstance(node, yaml.SequenceNode):
            for one in node.value:
                walk(one, keys)
        elif isinstance(node, yaml.ScalarNode):
            mark = node.end_mark
            rest = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
            beside = re.search(r"\s#\s*(.*\S)", rest)
            if beside:
                found[keys, node.value] = beside[1]

    walk(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return found
