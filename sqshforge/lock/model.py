"""Locks: what a recipe resolved to, with hashes, so that every build takes the same bytes.

What could not be resolved where the lock was made is listed in `unlocked`, entry by entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sqshforge.errors import RequestError
from sqshforge.recipe import Recipe, ancestors


class Entry(BaseModel):
    """A piece of a lock: immutable, and nothing in it that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LockedImage(Entry):
    """An image, named as `Recipe.tagged` does, and the digest that its tag had.

    There is none where no registry answered.
    """

    image: str
    digest: str | None


class LockedPackage(Entry):
    """One Python package: its version and the sums of the files that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def requirement(self) -> str:
        """The package as a line of a requirements file, with its hashes."""
        hashes = "".join(f" \\\n    --hash={one}" for one in self.hashes)
        return f"{self.name}=={self.version}{hashes}\n"


class LockedIndex(Entry):
    """The packages that one index alone gives; without hashes where it did not answer."""

    name: str
    url: str
    packages: tuple[LockedPackage, ...]


class LockedPython(Entry):
    """The whole closure of the recipe's Python packages for one interpreter and platform."""

    version: str
    platform: str
    installer: LockedPackage
    packages: tuple[LockedPackage, ...]
    built: tuple[LockedPackage, ...] = ()  # hashes of source distributions
    builders: tuple[LockedPackage, ...] = ()
    bound: tuple[LockedIndex, ...] = ()

    def of_indexes(self) -> tuple[LockedPackage, ...]:
        """The packages that are bound to an index."""
        return tuple(one for index in self.bound for one in index.packages)

    def is_whole(self) -> bool:
        """Whether every index answered that packages are bound to."""
        return all(one.hashes for one in self.of_indexes())

    def installer_wheel(self) -> str:
        """The file name of pip's wheel, which lies among the wheels of a build's context."""
        return f"pip-{self.installer.version}-py3-none-any.whl"


class LockedApt(Entry):
    """The Debian packages that the recipe's need, as the suite had them."""

    suite: str
    packages: tuple[tuple[str, str], ...]  # name, version


class LockedSource(Entry):
    """A git repository and the commit that its tag or branch was at."""

    name: str
    git: str
    ref: str
    commit: str | None
    license: str | None = None


class LockedArchive(Entry):
    """A file to download and its sum."""

    name: str
    url: str
    sha256: str | None


class LockedPatch(Entry):
    """A patch, and the sum that the one file it changes has afterwards."""

    file: str
    sha256: str
    of: str
    path: str
    after: str


class Lock(Entry):
    """Everything that a recipe resolved to."""

    target: str
    inputs: str  # digest of the recipe's pins, so that a lock of another recipe is noticed
    base: LockedImage
    compiler: LockedImage | None = None
    apt: LockedApt | None = None
    python: LockedPython
    sources: tuple[LockedSource, ...] = ()
    archives: tuple[LockedArchive, ...] = ()
    patches: tuple[LockedPatch, ...] = ()
    unlocked: tuple[str, ...] = ()

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    def digest(self) -> str:
        """Changes whenever anything in the lock does."""
        return f"sha256:{hashlib.sha256(self.text().encode()).hexdigest()}"

    def sums(self) -> dict[str, frozenset[str]]:
        """Package names to the sha256 sums of their files."""
        python = self.python
        return {
            package.name: frozenset(one.removeprefix("sha256:") for one in package.hashes)
            for package in (*python.packages, *python.builders, python.installer)
        }


def requirements(packages: Iterable[LockedPackage]) -> str:
    """Packages as a requirements file for `pip install --require-hashes`."""
    return "".join(package.requirement() for package in packages)


def inputs(recipe: Recipe) -> str:
    """A digest of what a lock is resolved from, and of nothing else in the recipe."""
    bootstrap = recipe.base.bootstrap
    pins = {
        "platform": recipe.platform.name,
        "base": [recipe.base.image, recipe.base.compiler, bootstrap and bootstrap.suite],
        "parameters": dict(recipe.parameters),
        "apt": recipe.apt,
        "python": recipe.python.model_dump(mode="json"),
        "triton": recipe.triton and recipe.triton.version,
        "sources": {name: one.model_dump(mode="json") for name, one in recipe.sources.items()},
        "archives": {  # another address of the same file is another way to it, and no other pin
            name: one.model_dump(mode="json", exclude={"mirrors"})
            for name, one in recipe.archives.items()
        },
        "patches": dict(recipe.patches),
    }
    return "sha256:" + hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()


def path_of(name: str, recipes: Path) -> Path:
    """Where the lock is of a target, or of a target on a platform: `Recipe.name`."""
    return recipes / "locks" / f"{name}.lock"


def read(name: str, recipes: Path) -> Lock:
    """The lock of that name as it lies there; `RequestError` where it is absent or broken."""
    path = path_of(name, recipes)
    again = f"sqshforge lock {name.partition('.')[0]}"
    try:
        return Lock.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise RequestError("the target has no lock", where=str(path), fix=again) from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise RequestError(
            f"the lock cannot be read: {first}", where=str(path), fix=again
        ) from None


def earlier(name: str, recipes: Path) -> Lock | None:
    """The lock of that name, to keep what still holds of it; None for none or a broken one."""
    try:
        return read(name, recipes)
    except RequestError:
        return None


def inherited(recipe: Recipe, recipes: Path) -> Lock | None:
    """The lock that a recipe's starts from.

    It is that of the same target on the default platform, so that platforms differ where they must;
    else that of the nearest recipe that this one extends and that has one.
    """
    suffix = recipe.platform.suffix
    names = [recipe.target] if suffix else []
    names += [f"{one.target}{suffix}" for one in ancestors(recipe, recipes)]
    locks = (earlier(name, recipes) for name in names)
    return next((lock for lock in locks if lock is not None), None)


def changes(before: Lock | None, now: Lock) -> list[str]:
    """What a new lock says otherwise, in a few words each.

    Versions of Debian packages are noted and not pinned, so that they are no change.
    """
    if before is None:
        return ["there was no lock"]
    found = []
    for key in type(now).model_fields:
        old, new = getattr(before, key), getattr(now, key)
        if key != "apt" and old != new:
            found += _packages(before, now) if key == "python" else [f"{key} changed"]
    return found


def _packages(before: Lock, now: Lock) -> list[str]:
    """Which Python packages changed."""

    def versions(lock: Lock) -> dict[str, LockedPackage]:
        python = lock.python
        every = (*python.packages, *python.built, *python.builders, python.installer)
        return {one.name: one for one in (*every, *python.of_indexes())}

    old, new = versions(before), versions(now)
    named = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return [_change(name, old.get(name), new.get(name)) for name in named] or ["python changed"]


def _change(name: str, old: LockedPackage | None, new: LockedPackage | None) -> str:
    if old and new and old.version == new.version:
        return f"{name}: {new.version} with other files"
    return f"{name}: {old.version if old else 'none'} -> {new.version if new else 'none'}"


def set_by_hand(lock: Lock, recipe: Recipe, wanted: Recipe) -> Lock:
    """A recipe's lock for the same recipe with other parameters.

    Another region or account serves the same image, so that its digest holds; another tag is
    another image, and nothing is known of it. For another Python the locked packages are taken as
    they are, and that is reported: what they need there was not resolved.
    """
    lock = _with_other_tags(lock, recipe, wanted)
    version = wanted.python.version
    if version == lock.python.version:
        return lock
    entry = f"Python packages: they were resolved for Python {lock.python.version}, not {version}"
    python = lock.python.model_copy(update={"version": version})
    return lock.model_copy(update={"python": python, "unlocked": (*lock.unlocked, entry)})


def _with_other_tags(lock: Lock, recipe: Recipe, wanted: Recipe) -> Lock:
    """The lock without the digests of images whose tags are others now."""
    images = {"base": wanted.base.image, "compiler": wanted.base.compiler}
    for key, image in images.items():
        if image is None or wanted.tagged(image) == recipe.tagged(image):
            continue
        entry = f"{key} image {wanted.address(image)}: its tag was set by hand"
        others = (one for one in lock.unlocked if not one.startswith(f"{key} image "))
        unknown = LockedImage(image=wanted.tagged(image), digest=None)
        lock = lock.model_copy(update={key: unknown, "unlocked": (entry, *others)})
    return lock


def load(recipe: Recipe, recipes: Path) -> Lock:
    """The recipe's lock; `RequestError` where it is absent, broken or of other pins."""
    lock = read(recipe.name, recipes)
    if lock.inputs != inputs(recipe):
        raise RequestError(
            "the lock is out of date: the recipe's pins changed after it was made",
            where=str(path_of(recipe.name, recipes)),
            fix=f"sqshforge lock {recipe.target}",
        )
    return lock
