"""Check what this machine has and what it lacks, with the command that fixes each gap.

It runs before anything is installed, so it needs only the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqshforge.doctor import bases, engines, leftovers, mksquashfs, user
from sqshforge.doctor.finding import Finding, Host, tool
from sqshforge.errors import MissingError, WorkError
from sqshforge.host import suggest
from sqshforge.host.terminal import human
from sqshforge.network import access
from sqshforge.project import Project, in_the_way, owner

__all__ = ["Finding", "Host", "examine", "main", "require", "require_builder"]

ROOM = 10e9  # bytes that building and packing one small target needs at its peak
SHOWN = 3  # most gaps that an error names


def examine(host: Host) -> list[Finding]:
    """Check everything that building, packing, running and launching use."""
    return [
        *_python(host),
        *_work(host, is_made=False),
        *bases.findings(host),
        _slurm(host),
        _room(host.project.build),
        *_certificates(host),
        *_owners(host),
        *leftovers.findings(host.programs),
    ]


def require(host: Host, sqsh: Path) -> None:
    """Raise `MissingError` if this machine cannot build, pack and run a target.

    If the squash file exists already, tools that make a base image are not required.
    """
    _refuse(_work(host, is_made=sqsh.exists()))


def require_builder(host: Host) -> None:
    """Raise `MissingError` if this machine cannot build an image with the host's engine."""
    _refuse(
        [*engines.findings(host), *user.findings(host, builds=host.engine == "buildah", runs=False)]
    )


def _refuse(findings: Iterable[Finding]) -> None:
    gaps = [one for one in findings if one.needed and not one.ok]
    if gaps:
        lines = [f"\n    {one.what}: {one.detail}" for one in gaps[:SHOWN]]
        fixes = dict.fromkeys(one.fix for one in gaps[:SHOWN])
        raise MissingError(
            f"this machine lacks what it takes ({len(gaps)} in all; `make doctor` has the list):"
            + "".join(lines),
            fix="\n         ".join(fixes),
        )


def _work(host: Host, *, is_made: bool) -> Iterator[Finding]:
    """Yield the findings for building, packing and running a target."""
    builders = list(engines.findings(host))
    builds = any(one.what == engines.BUILDAH and one.ok and one.needed for one in builders)
    yield from builders
    if not is_made:
        yield from engines.base(host)
    yield mksquashfs.finding(host)
    yield tool(host, "unsquashfs", "reading launchers out of a sqsh")
    enroot = host.programs.which("enroot")
    yield Finding(
        "enroot (runs a sqsh)",
        enroot is not None,
        str(enroot or "not found; sqshforge run does without"),
        "install enroot's own package",
        needed=False,
    )
    yield tool(host, "unshare", "runs a sqsh without enroot", needed=enroot is None)
    yield from user.findings(host, builds=builds, runs=enroot is None)


def report(host: Host) -> tuple[str, int]:
    """Return the doctor's report, and its exit code."""
    found = examine(host)
    missing = [one for one in found if one.needed and not one.ok]
    lines = [line for one in found for line in one.lines()]
    if missing:
        return "\n".join([*lines, "", f"{len(missing)} missing"]), MissingError.exit_code
    following = suggest.make(host.project.root, "quickstart")
    return "\n".join([*lines, "", "all there", f"next: {following}"]), 0


def main(project: Project) -> int:
    """Print the report on this machine; return its exit code."""
    said, code = report(Host(project=project, engine=os.environ.get("ENGINE", "")))
    print(said)
    return code


def _python(host: Host) -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    is_new = sys.version_info >= (3, 10)
    yield Finding("Python 3.10 or later", is_new, version, host.install("python3"))
    made = host.project.root / ".venv/bin/python"
    has_parts = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    yield Finding(
        "Python's venv and ensurepip (make .venv)",
        has_parts or made.exists(),
        str(made) if made.exists() else "there" if has_parts else "not found",
        host.install("ensurepip"),
    )


def _slurm(host: Host) -> Finding:
    path = host.programs.which("sbatch")
    return Finding(
        "sbatch (launches jobs)",
        path is not None,
        str(path or "not found"),
        f"launch from a machine of the cluster (a test cluster: {host.install('sbatch')})",
        needed=False,
    )


def _room(folder: Path) -> Finding:
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    return Finding(
        f"room in {existing}",
        free >= ROOM,
        f"{human(free)} free",
        f"free {human(ROOM - free)} there" if free < ROOM else "",
    )


def _certificates(host: Host) -> Iterator[Finding]:
    has_pip = importlib.util.find_spec("pip") is not None
    settings = access.Pip()
    try:
        settings = access.pip(host.programs) if has_pip else settings
    except WorkError as error:
        first, *rest = (line.strip() for line in error.what.splitlines())
        fix = error.fix or "correct the file that pip names"
        yield Finding("pip's configuration", False, " ".join(rest) or first, fix)
    bundle = access.ca_bundle(settings)
    yield Finding(
        "CA certificates",
        bundle is not None,
        str(bundle or "not found"),
        host.install("certificates"),
    )


def _owners(host: Host) -> Iterator[Finding]:
    """Yield findings for folders of the checkout that another user may own, usually root."""
    root = host.project.root
    for folder in (root / ".venv", host.project.build):
        closed = in_the_way(folder)
        if folder.exists():
            yield Finding(
                f"{folder.name}/ is {host.user}'s",
                closed is None,
                "yes" if closed is None else f"{closed} belongs to {owner(closed)}",
                f"sudo chown -R {host.user} {shlex.quote(str(folder))}",
                needed=folder == host.project.build,
            )
