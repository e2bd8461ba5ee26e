"""Check the engines: docker with its daemon, or buildah, which needs none. One is enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sqshforge.doctor.finding import Finding, Host, tool
from sqshforge.engine.docker import client_with_buildkit, unfit
from sqshforge.host import suggest

BUILDAH = "buildah (builds images without a daemon)"
MOUNTS_SINCE = (1, 24)  # buildah's RUN --mount=type=bind
NETAVARK_SINCE = (1, 35)  # since this version, buildah starts nothing without netavark
# Where buildah looks for netavark; it does not search the PATH.
HELPERS = ("usr/local/libexec", "usr/local/lib", "usr/libexec", "usr/lib")


def findings(host: Host) -> Iterator[Finding]:
    buildah = host.programs.which("buildah")
    uses_buildah = host.engine == "buildah"
    if not uses_buildah:
        docker = _docker(host)
        uses_buildah = host.engine != "docker" and not docker.ok
        yield Finding(
            docker.what,
            docker.ok,
            docker.detail,
            docker.fix,
            needed=host.engine == "docker" or (host.engine == "" and buildah is None),
        )
    yield Finding(
        BUILDAH,
        buildah is not None,
        str(buildah or "not found"),
        host.install("buildah") + ("" if host.engine else "; not needed beside docker"),
        needed=uses_buildah,
    )
    if buildah is not None:
        yield from _of_version(host, buildah, uses_buildah)


def base(host: Host) -> Iterator[Finding]:
    """Check the tools that make a base image from Debian's packages if no registry has one."""
    has_one = any((host.project.build / "bases").glob("*.tar"))
    made = tool(host, "mmdebstrap", "makes the base image where no registry answers", needed=False)
    if made.ok:
        yield made
        names = ("gpgv", "sqv")  # apt calls the one it was built for
        verifier = next((path for one in names if (path := host.programs.which(one))), None)
        yield Finding(
            "gpgv or sqv (proves whose Debian's packages are)",
            verifier is not None,
            str(verifier or "not found"),
            host.install("gpgv"),
            needed=not has_one,
        )
        return
    yield made  # a registry may answer, which shows only when the base is pulled


def _docker(host: Host) -> Finding:
    what = "docker (builds images)"
    client = client_with_buildkit(host.programs)
    if client is None:
        found = host.programs.which("docker")
        why = unfit(found, host.programs) if found else None
        detail = f"{found} {why[0]}" if why else "not found"
        fix = why[1] if why else host.install("docker")
        return Finding(what, False, detail, f"{fix}; not needed beside buildah")
    asked = host.programs.attempt(
        [client, "version", "--format", "{{.Server.Version}}"], timeout=20
    )
    if asked.code == 0:
        return Finding(what, True, f"{client}, its daemon answers")
    if "permission denied" in asked.err.lower():
        fix = f"{suggest.sudo()}usermod --append --groups docker {host.user}, then log in again"
        return Finding(what, False, f"{client}, its daemon is not for {host.user}", fix)
    fix = f"{suggest.sudo()}systemctl start docker; not needed beside buildah"
    return Finding(what, False, f"{client}, no daemon answers", fix)


def _of_version(host: Host, buildah: Path, is_used: bool) -> Iterator[Finding]:
    """Check what depends on buildah's version."""
    said = host.programs.attempt([buildah, "--version"], timeout=20).out
    found = re.search(r"version (\d+)\.(\d+)(\.\d+)?", said)
    if found is None:
        return
    version = (int(found[1]), int(found[2]))
    if version < MOUNTS_SINCE:
        yield Finding(
            "buildah 1.24 or later (builds the CUDA targets)",
            False,
            f"{found[0].split()[1]} builds cpu-mamba; it cannot mount files of one stage in "
            "another, as all CUDA targets do",
            f"{host.install('docker')}, or a newer buildah",
            needed=False,
        )
    if version >= NETAVARK_SINCE:
        places = (host.root / folder / "podman/netavark" for folder in HELPERS)
        netavark = next((place for place in places if place.is_file()), None)
        yield Finding(
            "netavark (buildah starts nothing without it)",
            netavark is not None,
            str(netavark or "not found, and only recommended by buildah's package"),
            host.install("netavark"),
            needed=is_used,
        )
