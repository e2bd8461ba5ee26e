"""Mirrors: where this machine gets images, packages and sources, without a change of recipe.

They are set in one YAML file (`mirrors.yaml` in the checkout, or what SQSHFORGE_MIRRORS names) and
by environment variables, which win. Each is a beginning of addresses and what to put in its place;
of several that fit, the longest counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sqshforge.errors import RequestError, SqshforgeError

FILE = "SQSHFORGE_MIRRORS"
KINDS = ("images", "indexes", "sources")

Given = TypeVar("Given")
Failure = TypeVar("Failure", bound=SqshforgeError)


class Mirrors(BaseModel):
    """Beginnings of addresses, by kind, and what stands in their place."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: Mapping[str, str] = Field(default_factory=dict)
    indexes: Mapping[str, str] = Field(default_factory=dict)
    sources: Mapping[str, str] = Field(default_factory=dict)

    def image(self, reference: str) -> str:
        """Where a base image is pulled from; a name that an engine has is as good."""
        return _put(reference, self.images)

    def index(self, url: str) -> str:
        """Where the packages of an index are that a recipe names."""
        return _put(url, self.indexes)

    def source(self, url: str) -> str:
        """Where a git repository or an archive is fetched from."""
        return _put(url, self.sources)


def read_mirrors(root: Path, environment: Mapping[str, str] = os.environ) -> Mirrors:
    """The mirrors of this machine; `RequestError` for a file or a variable that is none."""
    named = environment.get(FILE)
    path = Path(named) if named else root / "mirrors.yaml"
    if named and not path.exists():
        raise RequestError("the mirrors file does not exist", where=f"{FILE}={named}")
    tables = _written(path).model_dump() if path.exists() else {}
    for kind in KINDS:
        variable = f"{FILE}_{kind.upper()}"
        if variable in environment:
            tables[kind] = {**tables.get(kind, {}), **_pairs(environment[variable], variable)}
    return Mirrors.model_validate(tables)


def _written(path: Path) -> Mirrors:
    """What a file says; a kind without a word after it has no mirrors."""
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(str(error), str(path)) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a day that is not in the calendar
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _wrong(problem, place) from None
    if not isinstance(data, dict):
        raise _wrong("it is no mapping of images, indexes and sources", str(path))
    try:
        return Mirrors.model_validate({key: {} if v is None else v for key, v in data.items()})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise _wrong(f"{place}: {first['msg']}", str(path)) from None


def first_given(
    addresses: Sequence[str], take: Callable[[str], Given], failure: type[Failure]
) -> tuple[Given | None, list[Failure]]:
    """What `take` gets from the first of several addresses of one thing that has it.

    And how it failed at those before; nothing where it failed at all of them. Another error than
    `failure` ends it at once.
    """
    failed: list[Failure] = []
    for address in addresses:
        try:
            return take(address), failed
        except failure as error:
            failed.append(error)
    return None, failed


def bare(address: str) -> str:
    """An address without the password that a mirror's may have: what can be shown."""
    try:
        parts = urlsplit(address)
    except ValueError:  # it is none, and is shown in an error
        return re.sub("//[^/]*@", "//", address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _pairs(text: str, variable: str) -> dict[str, str]:
    pairs = [one.partition("=") for one in text.split()]
    if not all(separator and old and new for old, separator, new in pairs):
        raise RequestError(
            f"{variable} is {text!r}", fix="write OLD=NEW, several with spaces between them"
        )
    return {old: new for old, _, new in pairs}


def _wrong(what: str, where: str) -> RequestError:
    return RequestError(
        f"the mirrors cannot be read: {what}",
        where=where,
        fix="docs/images/offline.md has an example of mirrors.yaml",
    )


def _put(address: str, table: Mapping[str, str]) -> str:
    fitting = [old for old in table if address.startswith(old)]
    if not fitting:
        return address
    longest = max(fitting, key=len)
    return table[longest] + address.removeprefix(longest)
