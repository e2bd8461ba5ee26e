"""The command that installs a program on this machine: apt-get's words, or dnf's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# The package of each program that we call; elsewhere it has the program's own name.
DEBIAN = {
    "aws": "awscli",
    "certificates": "ca-certificates",
    "docker": "docker.io",
    "ensurepip": "python3-venv",
    "mksquashfs": "squashfs-tools",
    "newgidmap": "uidmap",
    "newuidmap": "uidmap",
    "sbatch": "slurm-wlm",
    "ssh-keygen": "openssh-client",
    "umount": "mount",
    "unshare": "util-linux",
    "unsquashfs": "squashfs-tools",
}
FEDORA = {
    **DEBIAN,
    "docker": "docker",
    "ensurepip": "python3-libs",
    "gpgv": "gnupg2",
    "mmdebstrap": "",  # no package there that we know of
    "mount": "util-linux",
    "newgidmap": "shadow-utils",
    "newuidmap": "shadow-utils",
    "python3": "python3.11",
    "sbatch": "slurm",
    "ssh-keygen": "openssh",
    "umount": "util-linux",
}


def command(which: Callable[[str], Path | None], *programs: str) -> str:
    """How to install programs on this machine; `which` finds what is there."""
    is_fedora = which("apt-get") is None and which("dnf") is not None
    table = FEDORA if is_fedora else DEBIAN
    packages = dict.fromkeys(table.get(one, one) for one in programs)
    if not all(packages):
        lacking = " and ".join(one for one in programs if not table.get(one, one))
        return f"no package that we know of has {lacking} for this system"
    return f"{sudo()}{'dnf' if is_fedora else 'apt-get'} install {' '.join(packages)}"


def sudo() -> str:
    """What goes before a command that only root may run."""
    return "" if os.geteuid() == 0 else "sudo "
