"""The content of a lock file: what a recipe's pins resolved to, with hashes.

What could not be resolved where the lock was made is listed in `unlocked`.
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
    """A part of a lock: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LockedImage(Entry):
    """An image, named as by `Recipe.tagged`, and the digest that its tag had.

    The digest is None if it is not known, for example because no registry answered.
    """

    image: str
    digest: str | None


class LockedPackage(Entry):
    """One Python package: its version and the hashes of the files that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def requirement(self) -> str:
        """Return the package as a line of a requirements file, with its hashes."""
        hashes = "".join(f" \\\n    --hash={one}" for one in self.hashes)
        return f"{self.name}=={self.version}{hashes}\n"


class LockedIndex(Entry):
    """The packages that only one index may provide; without hashes if it did not answer."""

    name: str
    url: str
    packages: tuple[LockedPackage, ...]


class LockedPython(Entry):
    """The recipe's Python packages and all dependencies, for one interpreter and platform."""

    version: str
    platform: str
    installer: LockedPackage
    packages: tuple[LockedPackage, ...]
    built: tuple[LockedPackage, ...] = ()  # hashes of source distributions
    builders: tuple[LockedPackage, ...] = ()
    bound: tuple[LockedIndex, ...] = ()

    def of_indexes(self) -> tuple[LockedPackage, ...]:
        """Return the packages that are bound to an index."""
        return tuple(one for index in self.bound for one in index.packages)

    def is_whole(self) -> bool:
        """Whether every index to which packages are bound answered."""
        return all(one.hashes for one in self.of_indexes())

    def installer_wheel(self) -> str:
        """Return the file name of pip's wheel, which is among the wheels of a build's context."""
        return f"pip-{self.installer.version}-py3-none-any.whl"


class LockedApt(Entry):
    """The recipe's Debian packages and all dependencies, in the versions that the suite had."""

    suite: str
    packages: tuple[tuple[str, str], ...]  # name, version


class LockedSource(Entry):
    """A git repository and the commit that its tag or branch pointed to."""

    name: str
    git: str
    ref: str
    commit: str | None
    license: str | None = None


class LockedArchive(Entry):
    """A file to download and its checksum."""

    name: str
    url: str
    sha256: str | None


class LockedPatch(Entry):
    """A patch of one file, with its own checksum and that of the patched file (`after`)."""

    file: str
    sha256: str
    of: str
    path: str
    after: str


class Lock(Entry):
    """Everything that a recipe resolved to."""

    target: str
    inputs: str  # digest of the recipe's pins, to detect a lock that was made from other pins
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
        """Return a digest of everything in the lock."""
        return f"sha256:{hashlib.sha256(self.text().encode()).hexdigest()}"

    def sums(self) -> dict[str, frozenset[str]]:
        """Map package names to the sha256 sums of their files; without compiled and bound ones."""
        python = self.python
        return {
            package.name: frozenset(one.removeprefix("sha256:") for one in package.hashes)
            for package in (*python.packages, *python.builders, python.installer)
        }


def requirements(packages: Iterable[LockedPackage]) -> str:
    """Return packages as a requirements file for `pip install --require-hashes`."""
    return "".join(package.requirement() for package in packages)


def inputs(recipe: Recipe) -> str:
    """Return a digest of what a lock is resolved from, and of nothing else in the recipe."""
    bootstrap = recipe.base.bootstrap
    pins = {
        "platform": recipe.platform.name,
        "base": [recipe.base.image, recipe.base.compiler, bootstrap and bootstrap.suite],
        "parameters": dict(recipe.parameters),
        "apt": recipe.apt,
        "python": recipe.python.model_dump(mode="json"),
        "triton": recipe.triton and recipe.triton.version,
        "sources": {name: one.model_dump(mode="json") for name, one in recipe.sources.items()},
        "archives": {  # without mirrors: another address of the same file is not another pin
            name: one.model_dump(mode="json", exclude={"mirrors"})
            for name, one in recipe.archives.items()
        },
        "patches": dict(recipe.patches),
    }
    return "sha256:" + hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()


def path_of(name: str, recipes: Path) -> Path:
    """Return the path of a lock, by `Recipe.name`: the target and its platform's suffix."""
    return recipes / "locks" / f"{name}.lock"


def read(name: str, recipes: Path) -> Lock:
    """Read a lock without comparing it to its recipe; `RequestError` if it is absent or broken."""
    path = path_of(name, recipes)
    again = f"sqshforge lock {name.partition('.')[0]}"
    try:
        return Lock.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise RequestError("the target has no lock", where=str(path), fix=again) from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise RequestError(
            f"the lock cannot be read: {first}",
            where=str(path),
            fix=f"restore it, as by git; or remove it, then {again}",
        ) from None


def earlier(name: str, recipes: Path) -> Lock | None:
    """Read an earlier lock, to keep what still holds; None if it is absent.

    Raises `RequestError` if it cannot be read: without it, every version would be resolved anew.
    """
    return read(name, recipes) if path_of(name, recipes).exists() else None


def inherited(recipe: Recipe, recipes: Path) -> Lock | None:
    """Return the lock from which a recipe's own lock starts, if there is one.

    For a platform other than the default, it is the same target's lock for the default platform, so
    that platforms differ only where they must. Failing that, it is the lock of the nearest recipe
    that this one extends and that has a lock for the platform.
    """
    suffix = recipe.platform.suffix
    names = [recipe.target] if suffix else []
    names += [f"{one.target}{suffix}" for one in ancestors(recipe, recipes)]
    locks = (earlier(name, recipes) for name in names)
    return next((lock for lock in locks if lock is not None), None)


def changes(before: Lock | None, now: Lock) -> list[str]:
    """Describe each difference between two locks in a few words.

    Versions of Debian packages are recorded but not pinned, so they do not count.
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
    """Describe the change of each Python package that differs."""

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
    """Return a recipe's lock adapted to `wanted`, the same recipe with other parameters.

    Another region or account serves the same image, so its digest holds; another tag is another
    image, whose digest is not known. For another Python the locked packages are kept, and
    `unlocked` says that their dependencies were not resolved for it.
    """
    lock = _with_other_tags(lock, recipe, wanted)
    version = wanted.python.version
    if version == lock.python.version:
        return lock
    entry = f"Python packages: they were resolved for Python {lock.python.version}, not {version}"
    python = lock.python.model_copy(update={"version": version})
    return lock.model_copy(update={"python": python, "unlocked": (*lock.unlocked, entry)})


def _with_other_tags(lock: Lock, recipe: Recipe, wanted: Recipe) -> Lock:
    """Return the lock without the digests of images whose tags differ in `wanted`."""
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
    """Read a recipe's lock; `RequestError` if it is absent, broken or made from other pins."""
    lock = read(recipe.name, recipes)
    if lock.inputs != inputs(recipe):
        raise RequestError(
            "the lock is out of date: the recipe's pins changed after it was made",
            where=str(path_of(recipe.name, recipes)),
            fix=f"sqshforge lock {recipe.target}",
        )
    return lock
