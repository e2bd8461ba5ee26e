"""The syntax of names in recipes: packages, images, addresses, parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from packaging.version import Version
from pydantic import AfterValidator, Field

NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
DEBIAN_PACKAGE = r"^[a-z0-9][a-z0-9+.-]+$"
PINNED_PACKAGE = r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$"
PROJECT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
EXTRAS = r"(\[[a-z0-9,_-]+\])?"
VERSION = r"[A-Za-z0-9.!+_-]+"
REQUIREMENT = rf"^{PROJECT}{EXTRAS}=={VERSION}$"
BOUND = rf"^{PROJECT}(=={VERSION})?$"
NEED = rf"^{PROJECT}{EXTRAS}([<>=!~]=?{VERSION}(,[<>=!~]=?{VERSION})*)?$"
IMAGE_REFERENCE = r"^[a-z0-9{][a-zA-Z0-9{}._/-]*(:[0-9]+/[a-zA-Z0-9{}._/-]+)?(:[A-Za-z0-9{}._-]+)?$"
REPOSITORY = r"^[a-z0-9{][a-zA-Z0-9{}._/-]*(:[0-9]+/[a-zA-Z0-9{}._/-]+)?$"
GIT_ADDRESS = r"^(https?|ssh|file)://\S+$"
PATCH = r"^[a-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+\.patch$"


def _with_version(requirement: str) -> str:
    """Return the requirement unchanged; `ValueError` if its version is invalid (PEP 440)."""
    version = requirement.partition("==")[2]
    if version:
        Version(version)
    return requirement


def _version(version: str) -> str:
    Version(version)
    return version


def _one_line(text: str) -> str:
    """Return the text unchanged; `ValueError` if a Dockerfile could not hold it in quotes."""
    if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", text):
        raise ValueError(
            "has a line break or another control character; write one line, not | or >"
        )
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Package = Annotated[str, Field(pattern=DEBIAN_PACKAGE)]
Requirement = Annotated[str, Field(pattern=REQUIREMENT), AfterValidator(_with_version)]
Bound = Annotated[str, Field(pattern=BOUND), AfterValidator(_with_version)]
Installer = Annotated[str, Field(pattern=r"^pip==[0-9.]+$"), AfterValidator(_with_version)]
ExactVersion = Annotated[str, Field(pattern=rf"^{VERSION}$"), AfterValidator(_version)]
Name = Annotated[str, Field(pattern=NAME)]
Address = Annotated[str, Field(pattern=r"^(https?|file)://\S+$")]
PlatformName = Literal["linux/amd64", "linux/arm64"]

# The architectures of nvcc 12.1 to 13: compute capability times ten, as nvcc writes it.
Architecture = Literal[
    "70", "72", "75", "80", "86", "87", "89", "90", "90a",
    "100", "100a", "103", "103a", "110", "110a", "120", "120a", "121", "121a",
]  # fmt: skip


def put_in(text: str, parameters: Mapping[str, str]) -> str:
    """Replace each {NAME} in a text by its parameter's value; `ValueError` if it is undefined."""
    unknown = sorted(set(re.findall(r"{(\w*)}", text)) - set(parameters))
    if unknown:
        raise ValueError(f"{text} names {', '.join(unknown)}, which are not defined in parameters")
    return re.sub(r"{(\w+)}", lambda found: parameters[found[1]], text)


def normalize(requirement: str) -> str:
    """Return the normalized name of a Python package or requirement (PEP 503)."""
    name = re.split(r"[\[<>=!~;@ ]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def split_image(image: str) -> tuple[str, str]:
    """Split an image into its repository, and its tag with the colon, or "" without a tag."""
    above, slash, last = image.rpartition("/")
    name, colon, tag = last.partition(":")
    return f"{above}{slash}{name}", f"{colon}{tag}"
