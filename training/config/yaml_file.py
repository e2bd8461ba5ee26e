"""A YAML file, read. A key that stands twice is an error: YAML would take the last in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.errors import RequestError


def read(path: Path, name: str) -> Any:
    """Give what a file holds, None for nothing; errors call it by `name`.

    Raises OSError where it cannot be read, and RequestError where it is not YAML or a key stands
    twice, listing every such key with its section and line.
    """
    import yaml

    try:
        text = path.read_text()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or no such day
        reason = " ".join(str(error).split())
        raise RequestError(f"{name} is not YAML: {reason}") from error
    if repeated := _repeated(node, name):
        raise RequestError.of(repeated)
    return content


def _repeated(top: Any, name: str) -> list[str]:
    """List the keys that stand twice in one mapping, in the order of their lines."""
    import yaml

    found: list[tuple[int, str]] = []
    seen: set[int] = set()  # what has an alias may be in several places, and in itself
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
                    found.append((line, f"{place}: stands twice, in {there}; leave one out"))
                lines[key.value] = line
                rest.append((value, place, "."))
    return [fault for _, fault in sorted(found)]
