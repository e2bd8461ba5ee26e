"""Commands for the user to type: each works as shown, on this machine and from this folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

# The packages of the programs that sqshforge calls, if the names differ.
DEBIAN = {
    "aws": "awscli",
    "certificates": "ca-certificates",
    "docker": "docker.io",
    "ensurepip": "python3-venv",
    "mksquashfs": "squashfs-tools",
    "nbdfuse": "libnbd-bin",
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
    "mmdebstrap": "",  # no known package
    "mount": "util-linux",
    "nbdfuse": "nbdfuse",
    "newgidmap": "shadow-utils",
    "newuidmap": "shadow-utils",
    "python3": "python3.11",
    "sbatch": "slurm",
    "ssh-keygen": "openssh",
    "umount": "util-linux",
}


def sqshforge(*words: str | Path) -> str:
    """A call of this program, in the way that it was called."""
    return shlex.join([*_program(), *map(shown, words)])


def make(checkout: Path, target: str, **variables: str) -> str:
    """A call of the checkout's Makefile."""
    here = [] if _here() == checkout else ["-C", shown(checkout)]
    settings = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join(["make", *here, target, *settings])


def python(*words: str | Path) -> str:
    """A call of the Python that has this package."""
    return shlex.join([shown(Path(sys.executable)), *map(shown, words)])


def shown(word: str | Path) -> str:
    """An absolute path relative to the current folder if it lies below; any other word as it is."""
    if not isinstance(word, Path) or not word.is_absolute():
        return str(word)
    here = _here()
    return str(word.relative_to(here)) if here and word.is_relative_to(here) else str(word)


def _here() -> Path | None:
    """The current folder; None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def sqsh(file: Path) -> str:
    """A squash file for commands that also take targets, which have neither a / nor .sqsh."""
    word = shown(file)
    return word if "/" in word or word.endswith(".sqsh") else f"./{word}"


def _program() -> list[str]:
    """How this program was called: by its name if that is on the PATH, else by its path."""
    called = Path(sys.argv[0])
    if called.name != "sqshforge":  # `python -m sqshforge`
        return [shown(Path(sys.executable)), "-m", "sqshforge"]
    found = shutil.which("sqshforge")
    if found is not None and Path(found).samefile(called):
        return ["sqshforge"]
    return [shown(called.absolute())]


def install(which: Callable[[str], Path | None], *programs: str) -> str:
    """The command that installs programs on this machine; `which` finds installed ones."""
    is_fedora = which("apt-get") is None and which("dnf") is not None
    table = FEDORA if is_fedora else DEBIAN
    packages = dict.fromkeys(table.get(one, one) for one in programs)
    if not all(packages):
        lacking = " and ".join(one for one in programs if not table.get(one, one))
        return f"no package that we know of has {lacking} for this system"
    return f"{sudo()}{'dnf' if is_fedora else 'apt-get'} install {' '.join(packages)}"


def sudo() -> str:
    """The prefix of a command that only root may run."""
    return "" if os.geteuid() == 0 else "sudo "
