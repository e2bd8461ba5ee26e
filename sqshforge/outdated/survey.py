"""Look up all pins of a recipe at their sources; name each source that does not answer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from sqshforge import recipe as recipes
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Asked, Lock
from sqshforge.lock.git import references
from sqshforge.lock.resolve import apt_of, debian_versions
from sqshforge.network import access
from sqshforge.network.registries import TIMEOUT, Registries
from sqshforge.outdated.names import Comments, comments, newest
from sqshforge.outdated.packages import Packages
from sqshforge.outdated.pins import Pin
from sqshforge.platforms import Platform
from sqshforge.recipe import Recipe
from sqshforge.recipe.words import split_image

AT_ONCE = 8  # hosts asked at the same time: most of the time is spent waiting
SHORT = 12  # characters shown of a commit or digest

Answer = TypeVar("Answer")


@dataclass
class Hosts:
    """The sources of pins; each is asked only once, however many targets have the pin."""

    programs: Programs
    packages: dict[tuple[object, ...], Result] = field(default_factory=dict)
    registries: Registries = field(default_factory=Registries)
    _answers: dict[tuple[str, ...], object] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def references(self, url: str, ca: Path | None) -> dict[str, str] | None:
        """Return the tags and branches of a git repository; None if it does not answer."""
        return self._once(("git", url), lambda: references(url, self.programs, ca))

    def tags(self, image: str) -> list[str] | None:
        """Return all tags of an image's repository; None if its registry does not answer."""
        name = split_image(image)[0]
        return self._once(("tags", name), lambda: _tags(name, self.programs))

    def _once(self, question: tuple[str, ...], ask: Callable[[], Answer]) -> Answer:
        with self._lock:
            if question in self._answers:
                return self._answers[question]  # type: ignore[return-value]
        answer = ask()
        with self._lock:
            self._answers[question] = answer
        return answer


def _tags(name: str, programs: Programs) -> list[str] | None:
    if programs.which("skopeo") is None:
        return None
    said = programs.attempt(["skopeo", "list-tags", f"docker://{name}"], timeout=TIMEOUT)
    # null: a repository whose images were all deleted
    return list(json.loads(said.out)["Tags"] or ()) if said.code == 0 else None


def survey(recipe: Recipe, asked: Asked, hosts: Hosts) -> list[Pin]:
    """Return every pin of a recipe with what is newer, in the recipe's order.

    `asked.before` is the target's lock, to see what has moved since. A source that does not answer
    is not an error: its pins say so.
    """
    said = _comments(recipe, asked)
    access.choose_login_file()
    with asked.reporter.track(f"{recipe.target}: asking") as tracker:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            images = [
                pool.submit(_image, recipe, key, asked, hosts, said)
                for key in ("image", "compiler")
                if getattr(recipe.base, key)
            ]
            sources = [
                pool.submit(_source, recipe, name, asked, hosts, said) for name in recipe.sources
            ]
            packages = Packages(
                recipe, asked.pip, asked.mirrors, asked.programs, said, tracker, hosts.packages
            )
            python = packages.pins()
            tracker.note("images, sources, Debian packages")
            debian = [*_suite(recipe, asked), *_vendor_packages(recipe, asked, said)]
        return [
            *(one.result() for one in images),
            *debian,
            *python,
            *(one.result() for one in sources),
            *_archives(recipe, said),
        ]


def _comments(recipe: Recipe, asked: Asked) -> Comments:
    """Return the comments beside pins; the recipe's own win over those of recipes it extends."""
    folder = asked.project.recipes
    names = [recipe.target, *(one.target for one in recipes.ancestors(recipe, folder))]
    found: dict[tuple[tuple[str, ...], str], str] = {}
    for name in reversed(names):
        found |= comments((folder / f"{name}.yaml").read_text())
    return found


def _image(recipe: Recipe, key: str, asked: Asked, hosts: Hosts, said: Comments) -> Pin:
    """Look up the base or compiler image: newer tags named alike, and whether its own moved."""
    image = getattr(recipe.base, key)
    name, tag = split_image(recipe.address(image))
    tag = tag.removeprefix(":") or "latest"  # the default in registries
    pin = Pin(
        target=recipe.target,
        kind="image",
        name=name,
        pinned=tag,
        comment=said.get((("base", key), image), ""),
    )
    addresses = [asked.mirrors.image(one) for one in recipe.addresses(image)]
    if asked.programs.which("skopeo") is None:
        return replace(pin, silent="registries are asked through skopeo, which is not installed")
    for address in addresses:  # of the same repository, so that one answer is enough
        digest = hosts.registries.ask(address, asked.programs).digest
        tags = hosts.tags(address)
        if digest is not None or tags is not None:
            break
    else:
        return replace(pin, silent="its registry does not answer")
    known = _locked_digest(asked.before, recipe.tagged(image))
    moved = f"the tag has moved from {_short(known)} to {_short(digest)}"
    has_moved = bool(known and digest and known != digest)
    return replace(pin, newest=newest(tag, tags or ()), moved=moved if has_moved else "")


def _locked_digest(lock: Lock | None, image: str) -> str:
    images = (lock.base, lock.compiler) if lock else ()
    return next((one.digest or "" for one in images if one and one.image == image), "")


def _source(recipe: Recipe, name: str, asked: Asked, hosts: Hosts, said: Comments) -> Pin:
    """Look up a git source: newer tags or branches named alike, and whether its own moved."""
    source = recipe.sources[name]
    pin = Pin(
        target=recipe.target,
        kind="source",
        name=name,
        pinned=source.ref,
        comment=said.get((("sources", name, "ref"), source.ref), ""),
    )
    if asked.programs.which("git") is None:
        return replace(pin, silent="repositories are asked through git, which is not installed")
    names = hosts.references(asked.mirrors.source(source.git), access.ca_bundle(asked.pip))
    if names is None:
        return replace(pin, silent="its host does not answer")
    kind = next((one for one in ("tags", "heads") if f"{one}/{source.ref}" in names), None)
    if kind is None:
        return replace(pin, newest=newest(source.ref, ()), moved=f"{source.ref} is not there")
    alike = [one.removeprefix(f"{kind}/") for one in names if one.startswith(f"{kind}/")]
    locked = source.commit or _locked_commit(asked.before, name, source.ref)
    now = names[f"{kind}/{source.ref}"]
    moved = f"{source.ref} has moved from {_short(locked)} to {_short(now)}"
    patches = recipe.patches.get(name, ())
    top = newest(source.ref, alike)
    return replace(
        pin,
        newest=top,
        moved=moved if locked and locked != now else "",
        held_by=tuple(f"its patch is for this version: {one}" for one in patches)
        if top != source.ref
        else (),
    )


def _locked_commit(lock: Lock | None, name: str, ref: str) -> str:
    known = lock.sources if lock else ()
    return next((one.commit or "" for one in known if (one.name, one.ref) == (name, ref)), "")


def _short(digest: str | None) -> str:
    return (digest or "").removeprefix("sha256:")[:SHORT]


def _suite(recipe: Recipe, asked: Asked) -> list[Pin]:
    """Look up the Debian packages that a lock records for a bootstrapped base: all in one pin."""
    base = recipe.base.bootstrap
    locked = asked.before.apt if asked.before else None
    if base is None or locked is None or locked.suite != base.suite:
        return []
    pin = Pin(
        target=recipe.target,
        kind="Debian",
        name=base.suite,
        pinned=base.snapshot or f"{len(locked.packages)} packages",
    )
    now = debian_versions(base.suite, recipe.apt, recipe.platform, asked.programs)
    if isinstance(now, str):
        return [replace(pin, silent=now)]
    old = dict(locked.packages)
    other = [f"{name} {new}" for name, new in now.packages if old.get(name, new) != new]
    others = f"{len(other)} have other versions: {', '.join(other)}" if other else ""
    held = ("base.bootstrap.snapshot",) if base.snapshot and other else ()
    return [replace(pin, newest=pin.pinned, fits=pin.pinned, moved=others, held_by=held)]


def _vendor_packages(recipe: Recipe, asked: Asked, said: Comments) -> list[Pin]:
    """Look up the Debian packages that are pinned to a version in a vendor's archive."""
    found = []
    for name, source in recipe.apt_sources.items():
        wanted = {one.partition("=")[0]: one for one in source.packages if "=" in one}
        # Nothing is installed from this archive here, so its signature does not matter.
        line = f"deb [trusted=yes] {source.url} {source.suite} {source.component}"
        if asked.programs.which("apt-get") is None:
            newer, why = {}, "archives are asked through apt-get, which is not installed"
        else:
            answer = _candidates([line], list(wanted), recipe.platform, asked.programs)
            silence = "does not answer" if answer is None else "does not have it"
            newer, why = answer or {}, f"the archive {name} {silence}"
        for package, one in wanted.items():
            pin = Pin(
                target=recipe.target,
                kind="Debian",
                name=package,
                pinned=one.partition("=")[2],
                comment=said.get((("apt_sources", name, "packages"), one), ""),
            )
            silent = "" if package in newer else why
            found.append(replace(pin, newest=newer.get(package), silent=silent))
    return found


def _candidates(
    sources: Sequence[str], packages: Sequence[str], platform: Platform, programs: Programs
) -> dict[str, str] | None:
    """Return the version of each package that apt would take; None if a source does not answer."""
    with apt_of(sources, platform) as apt:
        # Without this setting, an update succeeds even if a host cannot be reached.
        update = [*apt("apt-get"), "-o", "APT::Update::Error-Mode=any", "update"]
        if programs.attempt(update).code != 0:
            return None
        asked = [*apt("apt-cache"), "policy", *packages]
        said = programs.attempt(asked, env={"LC_ALL": "C", "LANGUAGE": ""})
    found = re.findall(r"^(\S+):\n(?:  .*\n)*?  Candidate: (\S+)$", said.out, re.MULTILINE)
    return {name: version for name, version in found if version != "(none)"}


def _archives(recipe: Recipe, said: Comments) -> list[Pin]:
    """Return a pin for each file with a digit in its name: no host lists other versions."""
    return [
        Pin(
            target=recipe.target,
            kind="archive",
            name=name,
            pinned=archive.file,
            comment=said.get((("archives", name, "url"), archive.url), ""),
            silent="its host lists no files: look at its maker's page",
        )
        for name, archive in recipe.archives.items()
        if re.search(r"\d", archive.file)
    ]
