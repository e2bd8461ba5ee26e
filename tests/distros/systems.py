"""The root file systems of other Linux systems, made once from their packages and kept.

They lie in `systems/` in the cache folder (SQSHFORGE_CACHE, else
/.cache/sqshforge); removing that folder makes them anew.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from sqshforge.host import locks
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter

# apt, which minimal Ubuntu lacks, and what README requires of a machine.
ASKED = ("apt", "git", "make", "python3", "sudo", "ca-certificates")


@dataclass(frozen=True)
class System:
    """A Linux system, by the names that its package archive uses."""

    name: str
    title: str
    suite: str
    components: str = "main"
    keys_from: str = ""  # the system whose archive has this one's keys, if another


DEBIAN_13 = System("debian-13", "Debian 13", "trixie")
SYSTEMS = {
    one.name: one
    for one in (
        System("debian-12", "Debian 12", "bookworm"),
        DEBIAN_13,
        System("ubuntu-22.04", "Ubuntu 22.04", "jammy", "main,universe", "debian-13"),
        System("ubuntu-24.04", "Ubuntu 24.04", "noble", "main,universe", "debian-13"),
    )
}


def tar_of(system: System, folder: Path) -> Path:
    """Make the system's root file system as a tar in `folder`: minimal, with `ASKED`.

    Raises `WorkError` if the packages cannot be downloaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / f"{system.name}.tar"
    busy = f"waiting for another process that makes {tar.name}"
    with locks.exclusive(folder / f".{system.name}.lock", busy, Reporter()):
        if not tar.is_file():
            _make(system, tar, folder)
    return tar


def _make(system: System, tar: Path, folder: Path) -> None:
    partial = folder / f".{system.name}.tar"
    argv: list[str | Path] = ["mmdebstrap", "--variant=minbase", f"--include={','.join(ASKED)}"]
    argv += [f"--components={system.components}"]
    with tempfile.TemporaryDirectory() as keys:
        if system.keys_from:
            Path(keys).chmod(0o755)  # apt reads them as its own user
            argv += [f"--keyring={_ubuntu_keys(SYSTEMS[system.keys_from], folder, Path(keys))}"]
        Programs().capture([*argv, system.suite, partial])
    partial.rename(tar)


def _ubuntu_keys(debian: System, folder: Path, place: Path) -> Path:
    """Return Ubuntu's archive keys, from Debian's package of them, which Debian's apt verifies."""
    from tests.distros.machine import machine

    with machine(debian, folder) as one:
        got = one.run("cd /tmp && apt-get -qq update && apt-get -qq download ubuntu-keyring")
        assert got.code == 0, got.output
        (package,) = (one.root / "tmp").glob("ubuntu-keyring_*.deb")
        Programs().capture(["dpkg-deb", "--extract", package, place / "package"])
    return place / "package/usr/share/keyrings/ubuntu-archive-keyring.gpg"
