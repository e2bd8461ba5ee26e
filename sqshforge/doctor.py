"""What of this machine is there and what is missing, each gap with the command that mends it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqshforge import machine
from sqshforge.engine.docker import Docker, client_with_buildkit
from sqshforge.programs import PACKAGES, Programs
from sqshforge.units import human

ROOM = 10e9  # bytes that building and packing one small target takes at its peak


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. `needed` things make the doctor's exit code 3."""

    what: str
    ok: bool
    detail: str
    mend: str = ""
    needed: bool = True


def examine(folder: Path, programs: Programs) -> list[Finding]:
    """Look at everything that building, packing, running and launching use."""
    return [
        _python(),
        *_engines(programs),
        _tool(programs, "mmdebstrap", "the base image where no registry answers"),
        _tool(programs, "mksquashfs", "packing"),
        _tool(programs, "unsquashfs", "reading launchers out of a sqsh"),
        *_runtime(programs),
        *_slurm(programs),
        _room(folder),
        _certificates(programs),
    ]


def lines(findings: list[Finding]) -> list[str]:
    """The findings for people: a line each, and a second one where something is to be done."""
    shown = []
    for one in findings:
        mark = "ok" if one.ok else "MISSING" if one.needed else "-"
        shown.append(f"{mark:8}{one.what}: {one.detail}")
        if not one.ok:
            shown.append(f"{'':8}  {'mend' if one.needed else 'if wanted'}: {one.mend}")
    return shown


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding(
        "Python 3.10 or later", sys.version_info >= (3, 10), version, "apt-get install python3"
    )


def _tool(programs: Programs, name: str, use: str, *, needed: bool = True) -> Finding:
    path = programs.which(name)
    mend = f"apt-get install {PACKAGES.get(name, name)}"
    return Finding(f"{name} ({use})", path is not None, str(path or "not found"), mend, needed)


def _engines(programs: Programs) -> Iterator[Finding]:
    """One engine is enough: docker with a daemon, or buildah, which needs none."""
    client = client_with_buildkit(programs)
    docker = Docker.reachable(programs)
    buildah = programs.which("buildah")
    if docker:
        detail = f"{client}, its daemon answers"
    elif client:
        detail = f"{client}, no daemon answers"
    else:
        detail = "no client with BuildKit" if programs.which("docker") else "not found"
    yield Finding(
        "docker (builds images)",
        docker is not None,
        detail,
        "apt-get install docker.io && systemctl start docker; not needed beside buildah",
        needed=buildah is None,
    )
    yield Finding(
        "buildah (builds images without a daemon)",
        buildah is not None,
        str(buildah or "not found"),
        "apt-get install buildah; not needed beside docker",
        needed=docker is None,
    )


def _runtime(programs: Programs) -> Iterator[Finding]:
    """Enroot runs a sqsh where it is installed; our own runtime needs its parts otherwise."""
    enroot = programs.which("enroot")
    yield Finding(
        "enroot (runs a sqsh)",
        enroot is not None,
        str(enroot or "not found; sqshforge run does without"),
        "install enroot's own package, if you want it",
        needed=False,
    )
    own = enroot is None
    yield _tool(programs, "unshare", "runs a sqsh without enroot", needed=own)
    if os.geteuid() != 0:
        yield _tool(programs, "squashfuse", "mounts a sqsh without root", needed=own)
        yield _tool(programs, "fuse-overlayfs", "for Linux before 6.6", needed=False)
        yield Finding(
            "/dev/fuse",
            Path("/dev/fuse").exists(),
            "there" if Path("/dev/fuse").exists() else "not there",
            "modprobe fuse (as root)",
            needed=own,
        )


def _slurm(programs: Programs) -> Iterator[Finding]:
    path = programs.which("sbatch")
    yield Finding(
        "sbatch (launches jobs)",
        path is not None,
        str(path or "not found"),
        "launch from a machine of the cluster (a test cluster: apt-get install slurm-wlm)",
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


def _certificates(programs: Programs) -> Finding:
    bundle = machine.ca_bundle(machine.pip(programs))
    return Finding(
        "CA certificates",
        bundle is not None,
        str(bundle or "not found"),
        "apt-get install ca-certificates",
    )
