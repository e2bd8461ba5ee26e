"""The base image: pulled where a registry answers, else made from Debian packages."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from sqshforge import epoch
from sqshforge.engine import Engine
from sqshforge.errors import MissingError
from sqshforge.lock import Lock
from sqshforge.machine import apt_sources
from sqshforge.programs import Programs
from sqshforge.progress import Reporter
from sqshforge.recipe import Bootstrap, Recipe
from sqshforge.render import base_reference

REPOSITORY = "localhost/sqshforge-base"
# Nobody reads manuals in a training image; what apt installs later keeps to this too.
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
KEPT = ("/usr/share/doc/*/copyright",)


def prepare(
    recipe: Recipe, lock: Lock, engine: Engine, cache: Path, programs: Programs, reporter: Reporter
) -> str:
    """Make sure that the engine has the base, and return the name it has there.

    Raises `MissingError` where no registry answers and the recipe has no other way.
    """
    reference = base_reference(lock)
    pulled = f"{REPOSITORY}:{_short(reference)}"
    bootstrap = recipe.base.bootstrap
    sources = deb_lines(bootstrap, programs) if bootstrap else []
    made_at = epoch.asked()
    bootstrapped = ""
    if bootstrap is not None:
        times = [] if made_at is None else [made_at]
        made_of = (bootstrap.model_dump(mode="json"), sources, *times)
        bootstrapped = f"{REPOSITORY}:{_short(*made_of)}"
    for name in (pulled, bootstrapped):
        if name and engine.image(name) is not None:
            return name
    reporter.say(f"base: asking the registry for {reference}")
    if engine.pull(reference, pulled):
        return pulled
    if bootstrap is None:
        raise MissingError(
            f"no registry gives the base image {reference}, and the recipe has no bootstrap",
            where=f"recipes/{recipe.target}.yaml, base",
            mend="check the network, the proxy and the registry login of the engine",
        )
    reporter.say(f"base: no registry answered; making Debian {bootstrap.suite} from its packages")
    tar = cache / f"base-{bootstrapped.rpartition(':')[2]}.tar"
    if not tar.is_file():
        make(bootstrap, sources, tar, programs, reporter)
    engine.load(tar, bootstrapped, made_at)
    return bootstrapped


def deb_lines(bootstrap: Bootstrap, programs: Programs) -> list[str]:
    """The archive to bootstrap from: the recipe's, else this machine's own for the suite.

    An empty list leaves the choice to mmdebstrap, which knows each suite's public archive.
    """
    if bootstrap.mirror is None:
        return apt_sources(bootstrap.suite, programs)
    if bootstrap.snapshot is None:
        return [f"deb {bootstrap.mirror} {bootstrap.suite} main"]
    # A snapshot's release files are past their date by design.
    mirror = bootstrap.mirror.replace("{snapshot}", bootstrap.snapshot)
    return [f"deb [check-valid-until=no] {mirror} {bootstrap.suite} main"]


def make(
    bootstrap: Bootstrap,
    sources: Sequence[str],
    tar: Path,
    programs: Programs,
    reporter: Reporter,
) -> None:
    """Bootstrap a system into a tar file, which is there whole or not at all.

    mmdebstrap goes by SOURCE_DATE_EPOCH itself: times, and the days in /etc/shadow.
    """
    argv: list[str | Path] = [programs.require("mmdebstrap", "it makes the base image")]
    argv += ["--variant=minbase", f"--include={','.join(('apt', *bootstrap.packages))}"]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    argv += [f"--dpkgopt=path-include={pattern}" for pattern in KEPT]
    argv += ["--aptopt=Acquire::Languages none"]
    tar.parent.mkdir(parents=True, exist_ok=True)
    partial = tar.with_name(f".{os.getpid()}-{tar.name}")
    argv += [bootstrap.suite, partial, *sources]
    try:
        with reporter.track("bootstrap") as tracker:
            programs.follow(argv, tracker.note)
        partial.rename(tar)
    finally:
        partial.unlink(missing_ok=True)


def _short(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
