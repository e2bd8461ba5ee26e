"""Mirrors: where this machine gets images, packages and sources, without a change of recipe.

They are set in one YAML file (`mirrors.yaml` in the checkout, or what SQSHFORGE_MIRRORS names) and
by environment variables, which win. Each is a beginning of addresses and what to put in its place;
of several that fit, the longest counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sqshforge.errors import RequestError

FILE = "SQSHFORGE_MIRRORS"
KINDS = ("images", "indexes", "sources")


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


def read(root: Path, environment: Mapping[str, str] = os.environ) -> Mirrors:
    """The mirrors of this machine; `RequestError` for a file or a variable that is none."""
    named = environment.get(FILE)
    path = Path(named) if named else root / "mirrors.yaml"
    data: dict[str, Any] = {}
    if path.is_file():
        try:
            data = yaml.safe_load(path.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise _wrong(str(error).splitlines()[0], str(path)) from None
    elif named:
        raise RequestError("the file of mirrors is not there", where=f"{FILE}={named}")
    if not isinstance(data, dict):
        raise _wrong("it is no mapping of images, indexes and sources", str(path))
    for kind in KINDS:
        variable = f"{FILE}_{kind.upper()}"
        if variable in environment:
            data[kind] = {**(data.get(kind) or {}), **_pairs(environment[variable], variable)}
    try:
        return Mirrors.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise _wrong(f"{place}: {first['msg']}", str(path)) from None


def _pairs(text: str, variable: str) -> dict[str, str]:
    pairs = [one.partition("=") for one in text.split()]
    if not all(separator and old and new for old, separator, new in pairs):
        raise RequestError(
            f"{variable} is {text!r}", mend="write OLD=NEW, several with spaces between them"
        )
    return {old: new for old, _, new in pairs}


def _wrong(what: str, where: str) -> RequestError:
    return RequestError(
        f"the mirrors cannot be read: {what}",
        where=where,
        mend="docs/offline.md has an example of mirrors.yaml",
    )


def _put(address: str, table: Mapping[str, str]) -> str:
    fitting = [old for old in table if address.startswith(old)]
    if not fitting:
        return address
    longest = max(fitting, key=len)
    return table[longest] + address.removeprefix(longest)
