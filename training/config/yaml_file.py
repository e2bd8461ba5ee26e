"""Read a YAML file. A repeated key is an error: YAML would silently take the last one.

Whatever YAML 1.1 has beyond the numbers and booleans of flags stays text, which is then read or
refused like a flag's: 0123 would be octal, 1:30 a number in base 60, `on` and `off` booleans.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from training.errors import RequestError

_WORDS = r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO"
_INTEGER = r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)"
_FRACTION = r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
_LIMITS = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_PLAIN = {
    "bool": (_WORDS, "tTfFyYnN"),
    "int": (_INTEGER, "-+0123456789"),
    "float": (f"{_FRACTION}|{_LIMITS}", "-+.0123456789"),
}
"""Type that is not text without quotes -> how it is written, and how it may begin."""


def read(path: Path, name: str) -> Any:
    """Return what a file holds, None if it is empty; errors call the file `name`.

    Raises OSError if it cannot be read, and RequestError if it is not YAML or repeats a key,
    listing every such key with its section and lines.
    """
    import yaml

    try:
        text = path.read_text()
        node = yaml.compose(text, Loader=_loader())
        content = yaml.load(text, Loader=_loader())
    except (ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or an invalid date
        reason = " ".join(str(error).split())
        raise RequestError(f"{name} is not YAML: {reason}") from error
    if repeated := _repeated(node, name):
        raise RequestError.of(repeated)
    return content


def value(text: str) -> Any:
    """Read a value as if it were in a file; what is not YAML is text."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except (ValueError, yaml.YAMLError):  # ValueError: an invalid date
        return text


@functools.cache
def _loader() -> Any:
    """Make a safe loader that reads everything as text except the types of _PLAIN."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    tags = {f"tag:yaml.org,2002:{name}": how for name, how in _PLAIN.items()}
    Loader.yaml_implicit_resolvers = {
        first: [one for one in those if one[0] not in tags]
        for first, those in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, (pattern, firsts) in tags.items():
        Loader.add_implicit_resolver(tag, re.compile(f"(?:{pattern})$"), list(firsts))
    return Loader


def _repeated(top: Any, name: str) -> list[str]:
    """List the keys that are repeated in one mapping, in the order of their lines."""
    import yaml

    found: list[tuple[int, str]] = []
    seen: set[int] = set()  # a node with an alias may be in several places, even in itself
    rest = [(top, f"{name}: ", "")]
    while rest:
        node, where, dot = rest.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            start = f"{where}: " if dot else where
            rest += [(one, f"{start}entry {at}", ": ") for at, one in enumerate(node.value, 1)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                place, line = f"{where}{dot}{key.value}", key.start_mark.line + 1
                if key.value in lines:
                    first = lines[key.value]
                    there = f"line {line}" if line == first else f"lines {first} and {line}"
                    found.append((line, f"{place}: is given twice, in {there}; fix: leave one out"))
                lines[key.value] = line
                rest.append((value, place, "."))
    return [fault for _, fault in sorted(found)]
