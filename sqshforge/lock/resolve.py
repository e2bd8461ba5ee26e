"""Resolve a recipe: find out the exact content of its pins, as far as this machine can."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge.errors import MissingError, RequestError
from sqshforge.host import temporary
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, Tracker
from sqshforge.lock.git import commit_of
from sqshforge.lock.model import (
    Lock,
    LockedApt,
    LockedArchive,
    LockedImage,
    LockedPackage,
    LockedPatch,
    LockedPython,
    LockedSource,
    inputs,
)
from sqshforge.lock.python import Resolver, uv_platform
from sqshforge.network import access
from sqshforge.network.access import Pip, apt_sources
from sqshforge.network.download import RefusedError, download_from
from sqshforge.network.mirrors import Mirrors
from sqshforge.network.registries import Answer, Registries, State
from sqshforge.platforms import Platform
from sqshforge.project import Project
from sqshforge.recipe import Recipe, Source, normalize


def debian_versions(
    suite: str, packages: Sequence[str], platform: Platform, programs: Programs
) -> LockedApt | str:
    """Return a suite's versions of packages and all dependencies, or why they are not known."""
    sources = apt_sources(suite, programs)
    if not sources:
        return f"this machine has no archive of {suite}"
    if not packages:
        return "none are named"
    with apt_of(sources, platform) as apt:
        listing = programs.attempt([*apt("apt-get"), "update"])
        if listing.code == 0:
            listing = programs.attempt([*apt("apt-get"), "--simulate", "install", *packages])
    if listing.code != 0:
        why = re.search("^E: (.+)", listing.err, re.MULTILINE)
        said = why[1] if why else f"exit code {listing.code}"
        return f"apt has no versions from this machine's archive of {suite}: {said}"
    found = re.findall(r"^Inst (\S+) \((\S+) ", listing.out, re.MULTILINE)
    return LockedApt(suite=suite, packages=tuple(sorted(found)))


@contextmanager
def apt_of(sources: Sequence[str], platform: Platform) -> Iterator[Callable[[str], list[str]]]:
    """Yield a function that returns the command line of an apt program with these sources alone.

    apt works in temporary folders: it needs no root, and does not use this machine's state.
    """
    with temporary.folder("apt") as folder:
        for place in ("state/lists/partial", "cache/archives/partial", "parts"):
            (folder / place).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text("".join(f"{line}\n" for line in sources))
        settings = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": folder / "parts",
            "APT::Architecture": platform.architecture,
            "APT::Architectures": platform.architecture,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "",
        }
        words = ["-qq", *(word for k, v in settings.items() for word in ("-o", f"{k}={v}"))]
        yield lambda program: [program, *words]


def locked_patches(recipe: Recipe, patches: Path) -> tuple[LockedPatch, ...]:
    """Return a recipe's patches, each with its checksum and that of the patched file."""
    return tuple(
        _patch(patches / file, file, of)
        for of, files in sorted(recipe.patches.items())
        for file in files
    )


def _patch(path: Path, file: str, of: str) -> LockedPatch:
    """Read a patch; `RequestError` if it is absent, changes several files or lacks `After:`."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        known = sorted(f"{p.parent.name}/{p.name}" for p in path.parent.parent.glob("*/*.patch"))
        raise RequestError(
            f"the patch {file} does not exist",
            where=f"patches of {of}",
            fix=f"patches are: {', '.join(known)}",
        ) from None
    header = text.partition("\n--- ")[0]
    after = re.search(r"^After: ([0-9a-f]{64})$", header, re.MULTILINE)
    changed = re.findall(r"^\+\+\+ [^/\s]+/(\S+)", text, re.MULTILINE)
    if after is None or len(changed) != 1:
        raise RequestError(
            "a patch must change one file and name its new checksum in the header (After: ...)",
            where=str(path),
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LockedPatch(file=file, sha256=digest, of=of, path=changed[0], after=after[1])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `resolve` works with.

    `parent` is the lock from which the new one starts (`inherited`), `before` the target's own lock
    so far.
    """

    project: Project
    pip: Pip
    mirrors: Mirrors
    programs: Programs
    reporter: Reporter
    before: Lock | None = None
    parent: Lock | None = None
    registries: Registries = field(default_factory=Registries)


def resolve(recipe: Recipe, asked: Asked) -> Lock:
    """Resolve all pins of a recipe.

    A pin that `asked.parent` also has gets its value from there; the versions of its Python
    packages are kept if they fit. If a source does not answer, its pin keeps the value from
    `asked.before`, else it is listed in `unlocked`. Raises `WorkError` if the Python packages
    cannot be resolved, `MissingError` if their index does not answer, and `RequestError` for an
    invalid patch.
    """
    open_: list[str] = []
    compiled = recipe.base.compiler
    with asked.reporter.track(f"resolving {recipe.name}") as tracker:
        tracker.note("images")
        base = _image(recipe, recipe.base.image, "base image", asked, open_)
        compiler = _image(recipe, compiled, "compiler image", asked, open_) if compiled else None
        tracker.note("Debian packages")
        apt = _apt(recipe, asked, open_)
        tracker.note("Python packages")
        python = _python(recipe, asked, open_)
        tracker.note("sources")
        sources = tuple(_source(recipe, name, asked, open_) for name in sorted(recipe.sources))
        archives = tuple(
            _archive(recipe, name, asked, open_, tracker) for name in sorted(recipe.archives)
        )
    return Lock(
        target=recipe.target,
        inputs=inputs(recipe),
        base=base,
        compiler=compiler,
        apt=apt,
        python=python,
        sources=sources,
        archives=archives,
        patches=locked_patches(recipe, asked.project.patches),
        unlocked=tuple(open_),
    )


def _image(recipe: Recipe, image: str, what: str, asked: Asked, open_: list[str]) -> LockedImage:
    """Find a tag's digest: the parent's, else the first from an address, else the earlier lock's.

    If there is none, the reason is added to `open_`.
    """
    name = recipe.tagged(image)
    digest = _digest(asked.parent, name)
    answers: list[Answer] = []
    for address in recipe.addresses(image) if digest is None else ():
        answers.append(asked.registries.ask(asked.mirrors.image(address), asked.programs))
        digest = answers[-1].digest
        if digest is not None:
            break
    digest = digest or _digest(asked.before, name)
    if digest is None:
        lacking = all(one.state is State.ABSENT for one in answers)
        said = "no registry has it" if lacking else "no registry answered"
        open_.append(f"{what} {recipe.address(image)}: {said}")
    return LockedImage(image=name, digest=digest)


def _digest(lock: Lock | None, name: str) -> str | None:
    """Return the digest that a lock has for an image, if any."""
    images = (lock.base, lock.compiler) if lock else ()
    return next((one.digest for one in images if one and one.image == name), None)


def _apt(recipe: Recipe, asked: Asked, open_: list[str]) -> LockedApt | None:
    bootstrap = recipe.base.bootstrap
    if bootstrap is None:
        if recipe.apt:
            open_.append("apt packages: their versions are those that the base's archives have")
        return None
    found = debian_versions(bootstrap.suite, recipe.apt, recipe.platform, asked.programs)
    before = asked.before.apt if asked.before else None
    if isinstance(found, LockedApt):
        return found
    if before is not None and before.suite == bootstrap.suite:
        return before
    if recipe.apt:
        open_.append(f"apt packages: {found}")
    return None


def _python(recipe: Recipe, asked: Asked, open_: list[str]) -> LockedPython:
    python = recipe.python
    before = asked.before
    known = [_packages(lock) for lock in (asked.parent, before) if lock]
    resolver = Resolver(recipe, asked.pip, asked.mirrors, asked.programs, known)
    found = resolver.everything()
    if found.unlocked and before and before.inputs == inputs(recipe) and before.python.is_whole():
        return before.python
    built = {normalize(one.package) for one in python.built}
    known = [lock.python.builders for lock in (asked.parent, before) if lock]
    builders = Resolver(recipe, asked.pip, asked.mirrors, asked.programs, known)
    open_ += found.unlocked
    return LockedPython(
        version=python.version,
        platform=uv_platform(recipe.platform),
        installer=builders.resolve([python.installer])[0],
        packages=tuple(one for one in found.packages if one.name not in built),
        built=tuple(one for one in found.packages if one.name in built),
        builders=builders.resolve(python.builders),
        bound=found.bound,
    )


def _packages(lock: Lock) -> tuple[LockedPackage, ...]:
    """Return all packages that a lock has for the image's Python."""
    return (*lock.python.packages, *lock.python.built, *lock.python.of_indexes())


def _source(recipe: Recipe, name: str, asked: Asked, open_: list[str]) -> LockedSource:
    source = recipe.sources[name]
    found = source.commit or _commit(asked.parent, name, source)
    if found is None:
        url = asked.mirrors.source(source.git)
        found = commit_of(url, source.ref, asked.programs, access.ca_bundle(asked.pip))
    commit = found or _commit(asked.before, name, source)
    if commit is None:
        silent = found is None
        said = "its host did not answer" if silent else "its repository has no such tag or branch"
        open_.append(f"source {name}, {source.git} at {source.ref}: {said}")
    return LockedSource(
        name=name, git=source.git, ref=source.ref, commit=commit, license=source.license
    )


def _commit(lock: Lock | None, name: str, source: Source) -> str | None:
    """Return the commit that a lock has for the same tag or branch of a source, if any."""
    pin = (name, source.git, source.ref)
    known = lock.sources if lock else ()
    return next((one.commit for one in known if (one.name, one.git, one.ref) == pin), None)


def _archive(
    recipe: Recipe, name: str, asked: Asked, open_: list[str], tracker: Tracker
) -> LockedArchive:
    """Find an archive's checksum: the recipe's, an earlier lock's, else by downloading it.

    If there is none, the reason is added to `open_`.
    """
    archive = recipe.archives[name]
    known = [one for lock in (asked.parent, asked.before) if lock for one in lock.archives]
    same = (one.sha256 for one in known if (one.name, one.url) == (name, archive.url))
    total = archive.sha256 or next(filter(None, same), None)
    if total is None:
        try:
            addresses = [asked.mirrors.source(one) for one in archive.addresses]
            # Not where builds keep theirs: that may hold another address's file of this name.
            with temporary.folder("archive") as folder:
                tracker.note(f"archive {archive.file}")
                place = folder / archive.file
                total = download_from(addresses, place, None, asked.pip, tracker)
        except MissingError as error:
            hosts = "their hosts" if archive.mirrors else "its host"
            tried = ", ".join(archive.addresses)
            said = "give it" if isinstance(error, RefusedError) else "answer"
            open_.append(f"archive {name}, {tried}: {hosts} did not {said}")
    return LockedArchive(name=name, url=archive.url, sha256=total)
