"""Find what killed commands left on this machine: folders, mounts in them, containers.

The next command of the same kind removes its own leftovers; this lists all of them, each with the
command that removes it now.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqshforge.doctor.finding import OWN_HOME, Finding
from sqshforge.engine import working_containers
from sqshforge.errors import MissingError
from sqshforge.host import locks, rootless, suggest, temporary
from sqshforge.host.programs import Programs
from sqshforge.project import Project, cache_home

WHAT = "left by a command that was killed"
TIMEOUT = 20.0  # seconds that an engine has to answer


def findings(programs: Programs) -> list[Finding]:
    """Return a finding for each leftover, or a single good one if there is nothing."""
    try:
        found = [*_folders(), *_containers(programs)]
    except (OSError, MissingError) as error:
        return [Finding(WHAT, False, f"cannot be seen: {error}", OWN_HOME, needed=False)]
    return found or [Finding(WHAT, True, "nothing")]


def _folders() -> Iterator[Finding]:
    pulled = cache_home() / "pulled"  # from registries, as image/registry.py does
    places = [one for one in (Path(tempfile.gettempdir()), pulled) if one.is_dir()]
    for place in (found for one in places for found in temporary.abandoned_folders(one)):
        sudo = suggest.sudo()  # an ordinary user's files may have other owners
        removal = f"{sudo}rm -rf {shlex.quote(str(place))}"
        mounts = temporary.mounts(place)
        if mounts:
            removal = f"{sudo}umount --lazy {shlex.join(map(str, mounts))} && {removal}"
        detail = f"{place}" + (f", with {len(mounts)} mounts in it" if mounts else "")
        yield Finding(WHAT, False, detail, removal, needed=False)


def _containers(programs: Programs) -> Iterator[Finding]:
    for engine, words, removal in (
        ("docker", ["ps", "--all", "--format", "{{.Names}}"], "docker rm --force"),
        ("buildah", ["containers", "--format", "{{.ContainerName}}"], "buildah rm"),
    ):
        program = programs.which(engine)
        if program is None:
            continue
        if engine == "buildah":
            rootless.choose_buildah_storage(program, programs)
        listed = programs.attempt([program, *words], timeout=TIMEOUT).out.splitlines()
        for name in temporary.abandoned(listed):
            yield Finding(WHAT, False, f"{name} of {engine}", f"{removal} {name}", needed=False)
        if engine == "buildah":
            yield from _of_builds(program, programs)


def _of_builds(buildah: Path, programs: Programs) -> Iterator[Finding]:
    """Yield the working containers of builds that no longer run, in all checkouts."""
    asked = programs.attempt([buildah, "info", "--format", "{{.store.GraphRoot}}"], timeout=TIMEOUT)
    if asked.code != 0:
        return
    for container, secrets in working_containers.of_builds(Path(asked.out.strip())).items():
        target = secrets.parent
        if not locks.is_held(Project(target.parents[1]).build_lock(target.name)):
            detail = f"a container of buildah, of the build of {target}"
            yield Finding(WHAT, False, detail, f"buildah rm {container}", needed=False)
