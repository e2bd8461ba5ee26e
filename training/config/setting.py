"""Settings: fields of frozen dataclasses that state what they mean and which values they allow.

The flags of the entry points, the keys of configuration files, their help and their checks come
from these fields, so a setting is described once. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from training.cli import with_home

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Torch takes whole numbers, as seeds and sizes are, of 64 bits."""


@dataclass(frozen=True)
class About:
    """What is known about a setting besides its type and default."""

    text: str
    least: float | None = None  # at least this
    above: float | None = None  # more than this, and finite
    choices: tuple[str, ...] = ()
    needed: bool = False  # must not be empty
    is_path: bool = False  # or a source that contains one

    def fault(self, name: str, value: Any) -> str | None:
        """Return what is wrong with a value; None if nothing is."""
        if value is None:  # auto
            return None
        if self.least is not None and not value >= self.least:
            if self.least == 0:
                return f"{name}: must not be negative, but is {value}"
            return f"{name}: must be at least {self.least:g}, not {value}"
        if self.above is not None and not self.above < value < math.inf:
            return f"{name}: must be more than {self.above:g} and finite, but is {value}"
        if self.choices and value not in self.choices:
            return f"{name}: must be one of {', '.join(self.choices)}, not {value!r}"
        if self.needed and not value:
            return f"{name}: must be given"
        return None


def setting(
    default: T,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    needed: bool = False,
    is_path: bool = False,
) -> T:
    """Make a dataclass field with a description; a type checker sees its default."""
    about = About(text, least, above, tuple(choices), needed, is_path)
    field: Any = dataclasses.field(default=default, metadata={"about": about})
    return field  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Setting:
    """A described field: its name, the reader of its text, its default and its description."""

    name: str
    read: Callable[[str], Any]
    default: Any
    about: About

    @property
    def is_text(self) -> bool:
        return self.read in (str, path)


def settings(section: type) -> Iterator[Setting]:
    """Yield the described fields of a dataclass, in their order."""
    for field in dataclasses.fields(section):
        if "about" in field.metadata:
            about = field.metadata["about"]
            read = path if about.is_path else READ[str(field.type)]
            yield Setting(field.name, read, field.default, about)


def named(section: type) -> dict[str, Setting]:
    """Return the described fields of a dataclass by name."""
    return {one.name: one for one in settings(section)}


def faults(section: Any) -> list[str]:
    """List what is wrong with each setting on its own."""
    found = (
        one.about.fault(one.name, getattr(section, one.name)) for one in settings(type(section))
    )
    return [fault for fault in found if fault]


def path(text: str) -> str:
    """Read a path, or a source that contains one; ~ is the home folder."""
    return with_home(text)


_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def boolean(text: str) -> bool:
    """Read True/False, true/false, 1/0 or yes/no."""
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("True or False")
    return text.lower() in _TRUE


def optional(text: str) -> bool | None:
    """Read a boolean, or auto as None, which leaves the choice to the program."""
    try:
        return None if text.lower() == "auto" else boolean(text)
    except ValueError:
        raise ValueError("True, False or auto") from None


def integer(text: str) -> int:
    """Read a whole number, from -LARGEST to LARGEST."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError("a whole number") from None
    if abs(value) > LARGEST:
        raise ValueError("a whole number of at most 64 bits")
    return value


def optional_number(text: str) -> float | None:
    """Read a number, or auto as None, which leaves the choice to the program."""
    try:
        return None if text.lower() == "auto" else float(text)
    except ValueError:
        raise ValueError("a number or auto") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def number_of(value: Any) -> float:
    """Read a number as YAML returns it: 3e-4, without a point, is text there."""
    return number("" if isinstance(value, bool) else str(value))


READ: dict[str, Callable[[str], Any]] = {
    "bool": boolean,
    "bool | None": optional,
    "float": number,
    "float | None": optional_number,
    "int": integer,
    "str": str,
}
"""Declared type of a field -> how the text of its flag is read."""
