"""A build's inputs from outside: fetched if there is a network, else taken from a bundle.

An input's place is its relative path, the same in a bundle and in a build context.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqshforge.build import wheels as listing
from sqshforge.build.dockerfile import argument
from sqshforge.build.wheels import File
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.files import link, sha256
from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Lock
from sqshforge.lock.git import snapshot
from sqshforge.network.access import Pip, ca_bundle
from sqshforge.network.download import download, download_from
from sqshforge.network.mirrors import Mirrors
from sqshforge.recipe import Recipe, Triton, normalize

VARIABLE = "OFFLINE"
MANIFEST = "bundle.json"


@dataclass(frozen=True, kw_only=True)
class BuildInput:
    """One file from outside, with its place and the sha256 that it was fetched with."""

    place: str
    path: Path
    sha256: str
    file: str = ""  # its path in a bundle, if it differs from `place`
    argument: str = ""  # the build argument that brings the sum, if the lock has none
    commit: str = ""  # of a source

    def noted(self, folder: Path) -> dict[str, str]:
        """Return the entry for the manifest of the bundle in `folder`."""
        facts = {key: value for key, value in vars(self).items() if key != "path"}
        return {**facts, "file": str(self.path.relative_to(folder))}


@dataclass(frozen=True, kw_only=True)
class BuildEnvironment:
    """How this machine reaches the outside, and the target's folder for what is fetched."""

    bundle: Path
    pip: Pip
    mirrors: Mirrors
    programs: Programs
    reporter: Reporter


def offline() -> bool:
    """Whether OFFLINE asks for builds without a network; raises `RequestError` if it is invalid."""
    word = os.environ.get(VARIABLE, "")
    if word not in ("", "0", "1"):
        raise RequestError(f"{VARIABLE} is {word!r}", fix=f"{VARIABLE}=1, or leave it unset")
    return word == "1"


@contextlib.contextmanager
def gathering(environment: BuildEnvironment) -> Iterator[None]:
    """Lock a bundle while filling it: other processes wait, and then find the files there."""
    environment.bundle.mkdir(parents=True, exist_ok=True)
    busy = f"waiting for another process that fills {environment.bundle}"
    with exclusive(environment.bundle / ".lock", busy, environment.reporter):
        yield


def fetched(what: Recipe, lock: Lock, environment: BuildEnvironment) -> list[BuildInput]:
    """Fetch sources, archives and source distributions, verified by the lock's sums if it has any.

    Raises `MissingError` if a host does not answer, `WorkError` for a wrong sum or a moved tag.
    """
    return [
        *_sources(what, lock, environment),
        *_archives(what, lock, environment),
        *_distributions(what, lock, environment),
    ]


def _sources(what: Recipe, lock: Lock, environment: BuildEnvironment) -> Iterator[BuildInput]:
    for source in lock.sources:
        if not what.builds_with(source.name):
            continue
        environment.reporter.say(f"source {source.name}: {source.git} at {source.ref}")
        with _offering_the_wheel(what, source.name):
            tar, commit = snapshot(
                source,
                environment.mirrors.source(source.git),
                environment.bundle / "sources",
                environment.programs,
                ca_bundle(environment.pip),
            )
        yield BuildInput(
            place=f"sources/{source.name}.tar",
            path=tar,
            sha256=sha256(tar),
            argument=argument("SOURCE", source.name),
            commit=commit,
        )


def _archives(what: Recipe, lock: Lock, environment: BuildEnvironment) -> Iterator[BuildInput]:
    for archive in lock.archives:
        if not what.builds_with(archive.name):
            continue
        asked = what.archives[archive.name]
        place = f"archives/{asked.file}"
        path = environment.bundle / place
        urls = [environment.mirrors.source(one) for one in asked.addresses]
        with (
            _offering_the_wheel(what, archive.name),
            environment.reporter.track(f"archive {path.name}") as tracker,
        ):
            total = download_from(urls, path, archive.sha256, environment.pip, tracker)
        yield BuildInput(
            place=place, path=path, sha256=total, argument=argument("ARCHIVE", archive.name)
        )


@contextlib.contextmanager
def _offering_the_wheel(what: Recipe, name: str) -> Iterator[None]:
    """Suggest Triton's wheel if an input that only its build from source needs is unavailable."""
    try:
        yield
    except MissingError as error:
        if name not in (*Triton.SOURCES, *Triton.ARCHIVES):
            raise
        raise MissingError(
            error.what,
            where=error.where or f"recipes/{what.target}.yaml, {name}",
            fix=f"{error.fix};\n"
            "or triton: {from: wheel} in the recipe: Triton's official wheel with the same patch, "
            "without a new lock (docs/background/triton.md)",
        ) from None


def _distributions(what: Recipe, lock: Lock, environment: BuildEnvironment) -> Iterator[BuildInput]:
    """Fetch the source distributions of packages that are compiled from them."""
    elsewhere = {normalize(one.package) for one in what.python.built if one.source}
    packages = [one for one in lock.python.built if one.name not in elsewhere]
    found = listing.files(
        packages, what.python.version, what.platform, environment.pip, environment.programs
    )
    for file in found:
        yield taken(file, f"sdists/{file.package}.tar.gz", environment)


def taken(file: File, place: str, environment: BuildEnvironment) -> BuildInput:
    """Download a package's file into the bundle, or link it from another target's bundle.

    In the bundle it has its own name; `place` is its place in the context.
    """
    kept = Path(place).with_name(file.name)
    path = environment.bundle / kept
    for other in environment.bundle.parent.glob(f"*/{kept}"):
        if not path.exists() and sha256(other) == file.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            link(other, path)
    with environment.reporter.track(file.name) as tracker:
        total = download(file.url, path, file.sha256, environment.pip, tracker)
    return BuildInput(place=place, path=path, sha256=total)


def of(path: Path, place: str) -> BuildInput:
    """Return the input for a file that is already on this machine."""
    return BuildInput(place=place, path=path, sha256=sha256(path))


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle's contents: files, and its images' names in an engine by build argument."""

    supplies: tuple[BuildInput, ...]
    images: Mapping[str, str]


def bundled(what: Recipe, lock: Lock, folder: Path) -> Bundle:
    """Read a bundle, verifying each file's checksum.

    Raises `MissingError` if there is no complete bundle of this lock, `WorkError` for a changed
    file.
    """
    platform = f" --platform {what.platform.name}" if what.platform.suffix else ""
    fix = f"on a machine with a network: sqshforge vendor {lock.target}{platform}"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        raise MissingError(
            f"there is no bundle of {lock.target} to build from", where=str(folder), fix=fix
        ) from None
    if manifest["lock"] != lock.digest():
        raise MissingError("the bundle was made for another lock", where=str(folder), fix=fix)
    supplies = tuple(BuildInput(path=folder / one["file"], **one) for one in manifest["files"])
    for one in supplies:
        if not one.path.is_file():
            raise MissingError(f"the bundle lacks {one.file}", where=str(folder), fix=fix)
        if sha256(one.path) != one.sha256:
            raise WorkError(
                f"{one.file} has another checksum than when the bundle was made",
                where=str(one.path),
                fix=f"remove it, and {fix}",
            )
    return Bundle(supplies=supplies, images=manifest["images"])


def record(lock: Lock, bundle: Bundle, folder: Path) -> Path:
    """Write a bundle's manifest and return its path; written last, it marks a complete bundle."""
    facts = {
        "target": lock.target,
        "lock": lock.digest(),
        "images": dict(bundle.images),
        "files": [one.noted(folder) for one in bundle.supplies],
    }
    partial = folder / f".{MANIFEST}.part"
    partial.write_text(json.dumps(facts, indent=2) + "\n")
    return partial.rename(folder / MANIFEST)


def arguments(supplies: Iterable[BuildInput]) -> Mapping[str, str]:
    """Return the build arguments that bring checksums."""
    return {one.argument: one.sha256 for one in supplies if one.argument}
