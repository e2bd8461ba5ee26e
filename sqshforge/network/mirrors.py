"""Mirrors: other addresses for images, packages and sources, without changes to recipes.

They are set in a YAML file (`mirrors.yaml` in the checkout, or the one SQSHFORGE_MIRRORS names) and
by environment variables, which win. Each maps a prefix of addresses to its replacement; of several
matching prefixes, the longest counts.
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
from sqshforge.recipe import recipe_file

FILE = "SQSHFORGE_MIRRORS"
KINDS = ("images", "indexes", "sources")

Given = TypeVar("Given")
Failure = TypeVar("Failure", bound=SqshforgeError)


class Mirrors(BaseModel):
    """Prefixes of addresses and their replacements, by kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: Mapping[str, str] = Field(default_factory=dict)
    indexes: Mapping[str, str] = Field(default_factory=dict)
    sources: Mapping[str, str] = Field(default_factory=dict)

    def image(self, reference: str) -> str:
        """Return where to pull a base image from, which may be a name that only the engine has."""
        return _put(reference, self.images)

    def index(self, url: str) -> str:
        """Return where to get the packages of an index that a recipe names."""
        return _put(url, self.indexes)

    def source(self, url: str) -> str:
        """Return where to fetch a git repository or an archive from."""
        return _put(url, self.sources)


def read_mirrors(root: Path, environment: Mapping[str, str] = os.environ) -> Mirrors:
    """Read this machine's mirrors; `RequestError` for an invalid file or variable."""
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
    """Read the mirrors in a file; a kind without a value has none."""
    try:
        text = path.read_text()
        data = yaml.safe_load(text) or {}
        twice = recipe_file.repeated(yaml.compose(text, Loader=yaml.SafeLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(str(error), str(path)) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _wrong(problem, place) from None
    if not isinstance(data, dict):
        raise _wrong("it is no mapping of images, indexes and sources", str(path))
    for place, what in twice:
        raise _wrong(f"{place} {what}", str(path))
    try:
        return Mirrors.model_validate({key: {} if v is None else v for key, v in data.items()})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise _wrong(f"{place}: {first['msg']}", str(path)) from None


def first_given(
    addresses: Sequence[str], take: Callable[[str], Given], failure: type[Failure]
) -> tuple[Given | None, list[Failure]]:
    """Return what `take` gets from the first address for which it does not fail.

    The second value is the list of failures before it. If all addresses fail, the first value is
    None. Only errors of type `failure` are caught.
    """
    failed: list[Failure] = []
    for address in addresses:
        try:
            return take(address), failed
        except failure as error:
            failed.append(error)
    return None, failed


def bare(address: str) -> str:
    """Return an address without a user and password, so that it can be shown."""
    try:
        parts = urlsplit(address)
    except ValueError:  # not a valid address; an error shows it
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
