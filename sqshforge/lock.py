"""Locks: what a recipe resolved to, with hashes, so that every build takes the same bytes.

What could not be resolved where the lock was made is listed in `unlocked`, entry by entry.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.machine import Pip, ca_bundle
from sqshforge.programs import Programs, Result
from sqshforge.recipe import Recipe, normalize

UV_PLATFORMS = {"linux/amd64": "x86_64-manylinux_2_28"}


class LockedBase(BaseModel):
    """The base image and the digest that its tag had; none where no registry answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image: str
    digest: str | None


class LockedPackage(BaseModel):
    """One Python package: its version and the sums of the files that may be installed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    version: str
    hashes: tuple[str, ...]

    def requirement(self) -> str:
        """The package as a line of a requirements file, with its hashes."""
        hashes = "".join(f" \\\n    --hash={one}" for one in self.hashes)
        return f"{self.name}=={self.version}{hashes}\n"


class LockedPython(BaseModel):
    """The whole closure of the recipe's Python packages for one interpreter and platform."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: str
    platform: str
    installer: LockedPackage
    packages: tuple[LockedPackage, ...]

    def installer_wheel(self) -> str:
        """The file name of pip's wheel, which lies among the wheels of a build's context."""
        return f"pip-{self.installer.version}-py3-none-any.whl"


class Lock(BaseModel):
    """Everything that a recipe resolved to."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    target: str
    inputs: str  # digest of the recipe's pins, so that a lock of another recipe is noticed
    base: LockedBase
    python: LockedPython
    unlocked: tuple[str, ...] = ()

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    def requirements(self) -> str:
        """The packages as a requirements file for `pip install --require-hashes`."""
        return "".join(package.requirement() for package in self.python.packages)

    def sums(self) -> dict[str, frozenset[str]]:
        """Package names to the sha256 sums of their files."""
        return {
            package.name: frozenset(one.removeprefix("sha256:") for one in package.hashes)
            for package in self.python.packages
        }


def inputs(recipe: Recipe) -> str:
    """A digest of what a lock is resolved from, and of nothing else in the recipe."""
    pins = {
        "platform": recipe.platform,
        "base": recipe.base.image,
        "python": recipe.python.model_dump(mode="json"),
    }
    return "sha256:" + hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()


def path_of(target: str, recipes: Path) -> Path:
    return recipes / "locks" / f"{target}.lock"


def load(recipe: Recipe, recipes: Path) -> Lock:
    """The recipe's lock; `RequestError` where it is absent, broken or of other pins."""
    path = path_of(recipe.target, recipes)
    again = f"sqshforge lock {recipe.target}"
    try:
        lock = Lock.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise RequestError("the target has no lock", where=str(path), mend=again) from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise RequestError(
            f"the lock cannot be read: {first}", where=str(path), mend=again
        ) from None
    if lock.inputs != inputs(recipe):
        raise RequestError(
            "the lock is out of date: the recipe's pins changed after it was made",
            where=str(path),
            mend=again,
        )
    return lock


def resolve(recipe: Recipe, pip: Pip, programs: Programs) -> Lock:
    """Resolve a recipe's pins: packages through uv, the base's digest where a registry answers."""
    digest = _base_digest(recipe.base.image, programs)
    unlocked = () if digest else (f"base image {recipe.base.image}: no registry answered",)
    return Lock(
        target=recipe.target,
        inputs=inputs(recipe),
        base=LockedBase(image=recipe.base.image, digest=digest),
        python=LockedPython(
            version=recipe.python.version,
            platform=UV_PLATFORMS[recipe.platform],
            installer=_resolve((recipe.python.installer,), recipe, pip, programs)[0],
            packages=_resolve(recipe.python.packages, recipe, pip, programs),
        ),
        unlocked=unlocked,
    )


def parse_compiled(text: str) -> tuple[LockedPackage, ...]:
    """Read what `uv pip compile --generate-hashes` prints."""
    joined = re.sub(r"\\\n\s*", "", text)
    packages = []
    for line in joined.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)((?:\s*--hash=\S+)*)", line)
        if match:
            name, version, hashes = match.groups()
            found = tuple(sorted(re.findall(r"--hash=(\S+)", hashes)))
            packages.append(LockedPackage(name=normalize(name), version=version, hashes=found))
    return tuple(sorted(packages, key=lambda package: package.name))


def _resolve(
    requirements: Sequence[str], recipe: Recipe, pip: Pip, programs: Programs
) -> tuple[LockedPackage, ...]:
    """Requirements and all that they need in turn, for the recipe's Python and platform.

    Indexes in folders of this machine are asked only where the others do not have everything:
    they would hide the files, and so the hashes, that other machines are going to get.
    """
    result = _compile(requirements, recipe, pip.without_local_indexes(), programs)
    if result.code != 0 and pip.without_local_indexes() != pip:
        result = _compile(requirements, recipe, pip, programs)
    if result.code != 0:
        raise WorkError(
            "the Python packages cannot be resolved:\n"
            + "\n".join(f"    {line}" for line in result.err.strip().splitlines()[:12]),
            where=f"recipes/{recipe.target}.yaml, python.packages",
            mend="name versions that pip on this machine can find; a CPU build of torch needs "
            "PyTorch's own wheel index in PIP_EXTRA_INDEX_URL or a folder in PIP_FIND_LINKS",
        )
    packages = parse_compiled(result.out)
    bare = [package.name for package in packages if not package.hashes]
    if bare:
        raise MissingError(
            f"the package index gives no hashes for: {', '.join(bare)}",
            where=f"recipes/{recipe.target}.yaml, python.packages",
        )
    return packages


def _compile(requirements: Sequence[str], recipe: Recipe, pip: Pip, programs: Programs) -> Result:
    """Let uv resolve, with the indexes and certificates that pip is configured with."""
    argv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    argv += ["--generate-hashes", "--no-annotate", "--no-header", "--only-binary", ":all:"]
    argv += ["--python-version", recipe.python.version]
    argv += ["--python-platform", UV_PLATFORMS[recipe.platform]]
    # pip takes the best file of all its indexes; uv would stop at the first that has the name.
    argv += ["--index-strategy", "unsafe-best-match"]
    argv += ["--default-index", pip.index] if pip.index else []
    argv += [word for url in pip.extra_indexes for word in ("--index", url)]
    argv += [word for url in pip.find_links for word in ("--find-links", url)]
    ca = ca_bundle(pip)
    environment = {"SSL_CERT_FILE": str(ca)} if ca else {}
    with tempfile.TemporaryDirectory(prefix="sqshforge-lock-") as folder:
        wanted = Path(folder) / f"{recipe.target}.in"
        wanted.write_text("".join(f"{one}\n" for one in requirements))
        return programs.attempt([*argv, wanted], env=environment)


def _base_digest(image: str, programs: Programs) -> str | None:
    """The digest behind a tag, asked of the registry by the tool that is there."""
    if programs.which("skopeo"):
        asked = programs.attempt(
            ["skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{image}"], timeout=60
        )
        if asked.code == 0 and asked.out.startswith("sha256:"):
            return asked.out.strip()
    return None
