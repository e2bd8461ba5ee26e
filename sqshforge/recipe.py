"""Recipes: what goes into an image, read from YAML and checked before anything is done.

All faults of a recipe are reported at once, each with its path and line in the file and with
what would be allowed there.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from sqshforge.errors import RequestError

TARGET_NAME = r"^[a-z0-9]+(-[a-z0-9]+)*$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
DEBIAN_PACKAGE = r"^[a-z0-9][a-z0-9+.-]+$"
REQUIREMENT = r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,_-]+\])?==[A-Za-z0-9.!+_-]+$"
IMAGE_REFERENCE = r"^[a-z0-9][a-zA-Z0-9._/-]*(:[0-9]+/[a-zA-Z0-9._/-]+)?(:[A-Za-z0-9._-]+)?$"

Package = Annotated[str, Field(pattern=DEBIAN_PACKAGE)]


class Part(BaseModel):
    """A piece of a recipe: immutable, and a key that it does not know is a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bootstrap(Part):
    """How the base is made with mmdebstrap where no image registry answers."""

    suite: str = Field(pattern=r"^[a-z]+$", description="Debian or Ubuntu code name")
    packages: tuple[Package, ...] = Field(
        default=(), description="packages beyond the minimal system"
    )
    mirror: str | None = Field(
        default=None,
        pattern=r"^(https?|file|copy)://\S+$",
        description="archive to take packages from; default: the machine's own for this suite",
    )
    snapshot: str | None = Field(
        default=None,
        pattern=r"^[0-9]{8}T[0-9]{6}Z$",
        description="moment of the archive, put in place of {snapshot} in mirror",
    )

    @model_validator(mode="after")
    def _snapshot_has_its_place(self) -> Bootstrap:
        if (self.snapshot is not None) != ("{snapshot}" in (self.mirror or "")):
            raise ValueError(
                "snapshot and mirror go together: a snapshot needs a mirror with {snapshot} in it"
            )
        return self


class Base(Part):
    """What the image starts from: a registry's image, or a system made from packages."""

    image: str = Field(pattern=IMAGE_REFERENCE, description="NAME:TAG in a registry")
    bootstrap: Bootstrap | None = Field(default=None, description="the way without a registry")


class Python(Part):
    """The Python packages, each pinned to one version; the lock adds their hashes."""

    version: str = Field(pattern=r"^3\.[0-9]+$", description="minor version, such as '3.11'")
    installer: str = Field(pattern=r"^pip==[0-9.]+$", description="runs in the build only")
    packages: tuple[Annotated[str, Field(pattern=REQUIREMENT)], ...] = Field(
        description="NAME==VERSION; what they need in turn is in the lock"
    )

    @field_validator("packages")
    @classmethod
    def _each_once(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        names = [normalize(package.partition("==")[0]) for package in packages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"named twice: {', '.join(twice)}")
        return packages


class SmokeTrain(Part):
    """The short training that proves an image: real text, and a loss that falls."""

    model_name: str = Field(description="a preset of the training package")
    dataset: str = Field(pattern=r"^text:/", description="text:GLOB inside the image")
    steps: int = Field(ge=60, description="optimizer steps")
    loss_ratio: float = Field(gt=0, lt=1, description="last loss / first loss must be below")


class Smoke(Part):
    """What the smoke test looks at inside the image."""

    imports: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")], ...] = ()
    train: SmokeTrain | None = None


class Recipe(Part):
    """One image, from its base to its smoke test."""

    target: str = Field(pattern=TARGET_NAME, description="the recipe's name and the file's stem")
    title: str = Field(min_length=1, description="one line for people")
    accelerator: Literal["cpu", "cuda", "neuron"]
    platform: Literal["linux/amd64"] = "linux/amd64"
    base: Base
    apt: tuple[Package, ...] = Field(default=(), description="Debian packages of the image")
    python: Python
    env: dict[Annotated[str, Field(pattern=VARIABLE)], str] = Field(default_factory=dict)
    launchers: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], ...] = Field(
        default=(), description="names in launch/, without .sbatch"
    )
    smoke: Smoke = Smoke()
    disk_gb: float = Field(gt=0, description="room a first build takes in the engine's storage")


def normalize(name: str) -> str:
    """A Python package's name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def schema() -> str:
    """The JSON Schema of recipes, for editors, as recipes/schema.json holds it."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def targets(folder: Path) -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find(target: str, folder: Path) -> Recipe:
    """The recipe of a target; `RequestError` for a name that is none."""
    path = folder / f"{target}.yaml"
    known = targets(folder)
    if target not in known:
        near = difflib.get_close_matches(target, known, n=1)
        raise RequestError(
            f"unknown target {target!r}",
            where=str(folder),
            mend=f"did you mean {near[0]}?" if near else f"targets are: {', '.join(known)}",
        )
    return load(path)


def load(path: Path) -> Recipe:
    """Read and check one recipe file.

    Raises `RequestError` with every fault of the file: broken YAML, unknown keys, wrong values.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise RequestError(
            f"the recipe cannot be read: {error.strerror}", where=str(path)
        ) from None
    except UnicodeDecodeError:
        raise RequestError("the recipe is not a text file (UTF-8)", where=str(path)) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _broken(path, error) from None
    if not isinstance(data, dict):
        raise RequestError(
            "a recipe is a mapping of keys to values, and this file holds none",
            where=str(path),
            mend="start from recipes/cpu-mamba.yaml; docs/recipes.md explains every key",
        )
    faults = [f"{where}: {what}" for where, what in _repeated(node)]
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        faults += [_told(fault, node) for fault in error.errors()]
        recipe = None
    if recipe is not None and recipe.target != path.stem:
        faults.append(f"target: is {recipe.target!r}, and the file's name says {path.stem!r}")
    if faults or recipe is None:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        raise RequestError(
            f"the recipe has {count}:" + "".join(f"\n    {fault}" for fault in faults),
            where=str(path),
            mend="docs/recipes.md explains every key; recipes/schema.json serves editors",
        )
    return recipe


def _broken(path: Path, error: yaml.YAMLError) -> RequestError:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return RequestError(f"the recipe is not valid YAML: {problem}", where=place)


def _repeated(node: yaml.Node | None, path: str = "") -> list[tuple[str, str]]:
    """Keys that stand twice in one mapping: YAML itself would take the last in silence."""
    faults: list[tuple[str, str]] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            here = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                faults.append((f"{here} (line {key.start_mark.line + 1})", "stands twice"))
            seen.add(key.value)
            faults += _repeated(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            faults += _repeated(value, f"{path}[{index}]")
    return faults


def _told(fault: ErrorDetails, node: yaml.Node | None) -> str:
    """One fault in words: its path and line, what is wrong, what is allowed."""
    steps = fault["loc"]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    line = _line(node, steps)
    place = f"{path.lstrip('.')}" + (f" (line {line})" if line else "")
    context: dict[str, Any] = fault.get("ctx", {})
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


def _line(node: yaml.Node | None, steps: tuple[int | str, ...]) -> int | None:
    """The line of the deepest step that is there."""
    line = None
    for step in steps:
        if isinstance(node, yaml.MappingNode):
            pairs = [(k, v) for k, v in node.value if k.value == step]
            if not pairs:
                break
            key, node = pairs[-1]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line


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
        spot = resolved(spot["items"] if isinstance(step, int) else spot["properties"][step])
    return sorted(spot.get("properties", {}))
