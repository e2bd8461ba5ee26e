"""Resolve Python packages with uv, for the recipe's own Python and platform, with their hashes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqshforge.errors import MissingError, WorkError
from sqshforge.host import temporary
from sqshforge.host.programs import Programs, Result
from sqshforge.lock.model import LockedIndex, LockedPackage, requirements
from sqshforge.network.access import Pip, uv_environment
from sqshforge.network.mirrors import Mirrors, bare
from sqshforge.platforms import Platform
from sqshforge.recipe import Recipe, normalize

NEWEST_GLIBC = 28  # wheels may need up to glibc 2.28, which the systems of all images have
# How uv reports an index that it could not query.
SILENT = re.compile("Failed to fetch|could not be queried|401 Unauthorized|403 Forbidden")


@dataclass(frozen=True)
class Found:
    """Packages from pip's own indexes, packages bound to other indexes, and what is unlocked."""

    packages: tuple[LockedPackage, ...]
    bound: tuple[LockedIndex, ...] = ()
    unlocked: tuple[str, ...] = ()


@dataclass(frozen=True)
class VendorIndex:
    """An index that precedes pip's own, for every name that it has or only for those in `only`."""

    url: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolver:
    """Calls uv with the indexes and certificates that pip on this machine is configured with.

    `known` holds the packages of earlier locks, of which the first takes precedence. A version that
    still fits is kept, so that a lock changes with its recipe and not with every release of a
    package that the recipe does not name.
    """

    recipe: Recipe
    pip: Pip
    mirrors: Mirrors
    programs: Programs
    known: Sequence[Sequence[LockedPackage]] = ()

    def resolve(self, wanted: Sequence[str]) -> tuple[LockedPackage, ...]:
        """Resolve requirements and all their dependencies.

        Indexes in local folders are used only if the others do not have everything: they would hide
        the files, and so the hashes, that other machines get. Raises `WorkError` if the
        requirements cannot be resolved, `MissingError` if an index does not answer or has no
        hashes.
        """
        if not wanted:
            return ()
        result = self._compile(wanted, self.pip.without_local_indexes())
        if result.code != 0 and self.pip.without_local_indexes() != self.pip:
            result = self._compile(wanted, self.pip)
        if result.code != 0:
            raise self._unresolved(result)
        packages = parse_compiled(result.out)
        without = [package.name for package in packages if not package.hashes]
        if without:
            raise MissingError(
                f"the package index gives no hashes for: {', '.join(without)}", where=self._where
            )
        self._refuse_strays(packages)
        return packages

    def everything(self) -> Found:
        """Resolve all that the recipe's Python needs, including packages bound to an index.

        Such an index is asked first, and a name that it has is taken from no other: others carry
        placeholders under these names. If it is `named_only`, it is asked for nothing but its
        packages. If one does not answer, the pins of all stay without hashes, as packages of one
        may need those of another, and are listed in `unlocked`.
        Raises the errors of `resolve`, and `WorkError` if a bound name would come from elsewhere.
        """
        wanted = self.recipe.packages()
        indexes = self.recipe.python.indexes
        if not indexes:
            return Found(self.resolve(wanted))
        urls = {name: self.mirrors.index(index.url) for name, index in indexes.items()}
        pins = {name: index.pins() for name, index in indexes.items()}
        result = self._compile(
            [*wanted, *(pin for some in pins.values() for pin in some)],
            self.pip.without_local_indexes(),
            first=vendor_indexes(self.recipe, self.mirrors),
        )
        if result.code == 0:
            return self._divided(result.out, urls)
        silent = [name for name, url in urls.items() if is_silent(url, result.err)]
        if not silent:
            raise self._unresolved(result)
        locked = tuple(
            LockedIndex(name=name, url=indexes[name].url, packages=tuple(map(_open, some)))
            for name, some in pins.items()
        )
        unlocked = tuple(
            f"{pin}: the index {culprit} ({indexes[culprit].url}) did not answer"
            for name, some in pins.items()
            for culprit in [name if name in silent else silent[0]]
            for pin in some
        )
        return Found(self.resolve(wanted), locked, unlocked)

    def _divided(self, said: str, urls: Mapping[str, str]) -> Found:
        """Divide the packages in uv's output by the index that they come from."""
        origins = parse_origins(said)
        packages = parse_compiled(said)
        of = {
            name: tuple(one for one in packages if origins.get(one.name, "") == _address(url))
            for name, url in urls.items()
        }
        others = tuple(one for one in packages if not any(one in some for some in of.values()))
        self._refuse_strays(others)
        indexes = self.recipe.python.indexes
        locked = tuple(
            LockedIndex(name=name, url=indexes[name].url, packages=some)
            for name, some in of.items()
        )
        return Found(others, locked)

    def _refuse_strays(self, packages: Iterable[LockedPackage]) -> None:
        """Raise `WorkError` if a package that is bound to an index came from another index."""
        strays = sorted({package.name for package in packages} & self.recipe.python.bound())
        if strays:
            raise WorkError(
                f"{', '.join(strays)} would come from an index other than the one set for it",
                where=self._where,
                fix="name a version of what needs it in python.indexes too, beside it",
            )

    def _unresolved(self, result: Result) -> WorkError | MissingError:
        if SILENT.search(result.err):
            return MissingError(
                "the package index does not answer:\n"
                + "\n".join(f"    {line}" for line in result.err.strip().splitlines()[:4]),
                where=self._where,
                fix="check the network, the proxy and pip's settings (docs/start/machines.md)",
            )
        return WorkError(
            "the Python packages cannot be resolved:\n"
            + "\n".join(f"    {line}" for line in result.err.strip().splitlines()[:12]),
            where=self._where,
            fix=self._ways_to_packages(),
        )

    def _ways_to_packages(self) -> str:
        indexes = self.recipe.python.indexes.values()
        if indexes:
            addresses = ", ".join(bare(self.mirrors.index(index.url)) for index in indexes)
            return (
                f"name versions that {addresses} has, or another mirror of it "
                "(docs/images/offline.md); other packages are from pip's own indexes "
                "(docs/start/machines.md)"
            )
        return (
            "name versions that pip on this machine can find; a CPU build of torch needs "
            "PyTorch's own wheel index in PIP_EXTRA_INDEX_URL or a folder in PIP_FIND_LINKS"
        )

    @property
    def _where(self) -> str:
        return f"recipes/{self.recipe.target}.yaml, python.packages"

    def _compile(
        self, wanted: Sequence[str], pip: Pip, first: Sequence[VendorIndex] = ()
    ) -> Result:
        """Resolve with uv; a name that an index in `first` has is taken from no other.

        Of two known versions uv would take the newer one. So it is given one of each package, and
        called again if that does not fit and another is known.
        """
        locks = [{one.name: one for one in lock} for lock in self.known]
        while True:
            known = {name: one for lock in reversed(locks) for name, one in lock.items()}
            result = self._ask(wanted, pip, first, known.values())
            found = {one.name: one.version for one in parse_compiled(result.out)}
            unfit = {name for name in found.keys() & known if found[name] != known[name].version}
            for name in unfit:
                next(lock for lock in locks if name in lock).pop(name)
            others = [(lock[name], found[name]) for lock in locks for name in unfit & lock.keys()]
            if all(other.version == version for other, version in others):
                return result

    def _ask(
        self,
        wanted: Sequence[str],
        pip: Pip,
        first: Sequence[VendorIndex],
        known: Iterable[LockedPackage],
    ) -> Result:
        """Call uv once; it keeps the known versions that fit."""
        argv = [*uv_compile(self.recipe), "--generate-hashes", "--emit-index-annotation"]
        argv += ["--python-platform", uv_platform(self.recipe.platform)]
        argv += uv_indexes(pip, first)
        with temporary.folder("lock") as place:
            asked_for = uv_question(place, self.recipe, wanted, first)
            (place / "known.txt").write_text(requirements(known))
            (place / "uv.toml").write_text(metadata(self.recipe))
            argv += ["--config-file", str(place / "uv.toml")]
            argv += ["--output-file", str(place / "known.txt"), str(asked_for)]
            asked = self.programs.attempt(argv, env=uv_environment(pip))
            require_uv(asked)
            return replace(asked, out=(place / "known.txt").read_text())


def uv_platform(platform: Platform) -> str:
    """Return the platform for uv: the processor, and the newest glibc that wheels may need."""
    return f"{platform.machine}-manylinux_2_{NEWEST_GLIBC}"


def uv_compile(recipe: Recipe) -> list[str]:
    """Return uv's command to resolve for a recipe's Python: wheels only, except for `built`."""
    python = recipe.python
    argv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet"]
    argv += ["--no-annotate", "--no-header", "--only-binary", ":all:"]
    argv += [word for one in python.built for word in ("--no-binary", normalize(one.package))]
    # Nothing is built with this Python; without --python, uv would download one of that version.
    return [*argv, "--python", sys.executable, "--python-version", python.version]


def vendor_indexes(recipe: Recipe, mirrors: Mirrors) -> tuple[VendorIndex, ...]:
    """Return the indexes that a recipe names, at this machine's mirrors."""
    return tuple(
        VendorIndex(
            mirrors.index(index.url),
            tuple(sorted(map(normalize, index.packages))) if index.named_only else (),
        )
        for index in recipe.python.indexes.values()
    )


def uv_question(
    place: Path, recipe: Recipe, wanted: Sequence[str], first: Sequence[VendorIndex] = ()
) -> Path:
    """Write the requirements for uv to a file in `place`, and return it.

    It is a pyproject.toml if an index may provide only some names: uv's command line has no option
    for that.
    """
    if not any(index.only for index in first):
        path = place / "wanted.in"
        path.write_text("".join(f"{one}\n" for one in wanted))
        return path
    lines = ["[project]", 'name = "wanted"', 'version = "0"']
    lines += [f'requires-python = ">={recipe.python.version}"']
    lines += [f"dependencies = {json.dumps(list(wanted))}"]
    sources = ["[tool.uv.sources]"]
    for number, index in enumerate(first):
        if index.only:
            lines += ["[[tool.uv.index]]", f'name = "vendor-{number}"', "explicit = true"]
            lines += [f"url = {json.dumps(index.url)}"]
            sources += [f'{name} = {{index = "vendor-{number}"}}' for name in index.only]
    path = place / "pyproject.toml"
    path.write_text("\n".join((*lines, *sources)) + "\n")
    return path


def uv_indexes(pip: Pip, first: Sequence[VendorIndex] = ()) -> list[str]:
    """Return uv's options for the indexes in `first` without `only`, followed by pip's own.

    If there are such, uv takes each name from the first index that has it.
    """
    whole = [index.url for index in first if not index.only]
    words = [word for url in whole for word in ("--index", url)]
    return words + pip.for_uv("first-index" if whole else "unsafe-best-match")


def metadata(recipe: Recipe) -> str:
    """Return uv configuration with the needs of compiled packages: uv cannot read their metadata.

    Their setup.py imports torch, which is not installed while resolving.
    """
    tables = []
    for one in recipe.python.built:
        name, _, version = one.package.partition("==")
        tables.append(
            "[[dependency-metadata]]\n"
            f"name = {json.dumps(normalize(name))}\n"
            f"version = {json.dumps(version)}\n"
            f"requires-dist = {json.dumps(list(one.needs))}\n"
        )
    return "\n".join(tables)


def parse_compiled(text: str) -> tuple[LockedPackage, ...]:
    """Parse the output of `uv pip compile --generate-hashes`; the packages are sorted by name."""
    joined = re.sub(r"\\\n\s*", "", text)
    packages = []
    for line in joined.splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)((?:\s*--hash=\S+)*)", line)
        if match:
            name, version, hashes = match.groups()
            found = tuple(sorted(re.findall(r"--hash=(\S+)", hashes)))
            packages.append(LockedPackage(name=normalize(name), version=version, hashes=found))
    return tuple(sorted(packages, key=lambda package: package.name))


def parse_origins(text: str) -> dict[str, str]:
    """Return the index of each package, from what uv prints with `--emit-index-annotation`."""
    found = {}
    name = ""
    for line in text.splitlines():
        start = re.match(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?==", line)
        if start:
            name = normalize(start[1])
        origin = re.match(r"\s+# from (\S+)", line)
        if origin:
            found[name] = _address(origin[1])
    return found


def require_uv(asked: Result) -> None:
    """Raise `MissingError` where this machine is why uv failed: its disk, or whose a folder is."""
    if asked.code != 0 and "(os error " in asked.err and not SILENT.search(asked.err):
        raise MissingError(
            "uv cannot look for packages:\n"
            + "\n".join(f"    {line}" for line in asked.err.strip().splitlines()[:4]),
            fix="make room or give rights there; UV_CACHE_DIR=DIR puts uv's cache elsewhere, "
            "and a folder of packages is one of pip's settings (docs/start/machines.md)",
        )


def is_silent(url: str, said: str) -> bool:
    """Whether uv reports that it could not query the index, rather than found nothing in it."""
    return any(SILENT.search(line) for line in said.splitlines() if _address(url) in line)


def _address(url: str) -> str:
    """Return an index's address as uv prints it."""
    return bare(url).rstrip("/")


def _open(pin: str) -> LockedPackage:
    name, _, version = pin.partition("==")
    return LockedPackage(name=normalize(name), version=version, hashes=())
