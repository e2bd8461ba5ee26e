"""The four files that enroot and pyxis expect in a squash file, made from an image's config."""

from __future__ import annotations

import shlex
import unicodedata
from dataclasses import dataclass, field

from sqshforge.project import NEWEST_EPOCH


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What an image says of how it is to be run, whatever engine it came from."""

    reference: str
    digest: str | None = None
    created: int = 0  # seconds of the epoch
    base_created: int | None = None  # the same of what is not in /sqshforge; None: not known
    size: int = 0  # bytes, unpacked
    layers: tuple[str, ...] = ()  # digests of their tars, the lowest first; empty: not known
    env: tuple[str, ...] = ()  # NAME=VALUE
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        """Raise `TypeError` for values of other types, `ValueError` for ones no image can have."""
        lists = (self.layers, self.env, self.entrypoint, self.cmd, self.volumes, *self.labels)
        if not all(isinstance(one, tuple) for one in lists) or any(
            len(pair) != 2 for pair in self.labels
        ):
            raise TypeError("expected a list of strings")
        texts = [
            self.reference,
            self.digest or "",
            self.workdir,
            *(one for all_ in lists for one in all_),
        ]
        if not all(isinstance(one, str) for one in texts):
            raise TypeError("expected a string")
        if not all(type(one) is int for one in (self.created, self.base_created or 0, self.size)):
            raise TypeError("expected a number")
        times = (self.created, self.base_created or 0)
        if not all(0 <= one <= NEWEST_EPOCH for one in times):
            raise ValueError("a time is out of the range of a squash file")
        if any("\0" in one for one in texts):
            raise ValueError("a string contains a NUL byte")
        for one in texts:
            one.encode(errors="surrogateescape")  # what follows writes it so


# What an image of ours carries beyond its packages: one top folder that no base image has.
CARRIED = "sqshforge"
# What docker puts into every container, and enroot takes over: empty files in /etc, mode 0755, a
# link, and the folders /dev, /proc and /sys. They are where the runtime mounts the host's.
EMPTY = ("hostname", "hosts", "resolv.conf")
MTAB = "/proc/mounts"
# A digest of all that an image of ours was built from, and what changes with each of its builds:
# /etc/rc does not have them, or it would change with the training code.
OF_BUILD = "io.sqshforge.inputs"
OF_EACH_BUILD = {
    OF_BUILD,
    "org.opencontainers.image.created",
    "org.opencontainers.image.revision",
}


def files(config: ImageConfig) -> dict[str, bytes]:
    """Path in the image to content; all are mode 0644, owner 0:0, and replace the image's own."""
    return {
        "etc/environment": environment(config).encode(errors="surrogateescape"),
        "etc/fstab": fstab(config).encode(errors="surrogateescape"),
        "etc/rc": rc(config).encode(errors="surrogateescape"),
        "etc/rc.local": b"# This file is sourced by /etc/rc when the container starts.\n",
    }


def is_left_out(name: bytes) -> bool:
    """Whether an entry of an image, by its path without a slash in front, is not taken over."""
    return name.startswith(b"dev/") or name == b".dockerenv"


def environment(config: ImageConfig) -> str:
    """One NAME=VALUE a line, unquoted: enroot reads it so.

    What a reader takes for the end of a line would start a new name.
    """
    return "".join(f"{one}\n" for one in config.env if not has_control(one, but="\t"))


def left_out(config: ImageConfig) -> list[str]:
    """The variables that no /etc/environment can hold."""
    return [one.partition("=")[0] for one in config.env if has_control(one, but="\t")]


def has_control(text: str, but: str = "") -> bool:
    """Whether a text has a control character, or another one that ends a line."""
    return any(unicodedata.category(one) in _CONTROLS and one not in but for one in text)


_CONTROLS = ("Cc", "Zl", "Zp")


def fstab(config: ImageConfig) -> str:
    r"""Write a bind mount, made at start, for each volume; a space is \040 in an fstab.

    Volumes with control characters are refused before; of an old record they are escaped too.
    """
    lines = []
    for volume in sorted(config.volumes):
        path = "".join(_ESCAPES.get(letter, letter) for letter in volume)
        options = "x-create=dir,bind,rw,nosuid,nodev"
        lines.append(f"${{ENROOT_ROOTFS}}{path} {path} none {options}\n")
    return "".join(lines)


_ESCAPES = {" ": r"\040", "\t": r"\011", "\n": r"\012", "\\": r"\134"}


def rc(config: ImageConfig) -> str:
    """The script that a container starts with: go to WORKDIR, run ENTRYPOINT and the command.

    Enroot's own begins with the image's address; the same image has several, and one file.
    """
    workdir = shlex.quote(config.workdir or "/")
    is_ours = any(key == OF_BUILD for key, _ in config.labels)
    changing = OF_EACH_BUILD if is_ours else set()
    labels = sorted((key, value) for key, value in config.labels if key not in changing)
    lines = ["#!/bin/sh", "# Written by sqshforge; the .json file beside the image says from what."]
    lines += [f"# {_line(key)} {_line(value)}" for key, value in labels]
    if any(one.startswith("PATH=") for one in config.env):
        lines += _PATH
    lines += [
        f"mkdir -p {workdir} 2> /dev/null",
        f"cd {workdir} && unset OLDPWD || exit 1",
        "",
        "if [ -s /etc/rc.local ]; then",
        "    . /etc/rc.local",
        "fi",
        "",
        *_start(config),
    ]
    return "\n".join(lines) + "\n"


# Of an image that has a PATH. What a process was started with stays in its /proc, one variable to a
# NUL; a value may have several lines.
_PATH = (
    "# The PATH that this was started with: a login shell's profile may set another.",
    r"given=$({ tr '\n\0' '\1\n' < /proc/$$/environ | sed -n 's/^PATH=//p'; } 2> /dev/null)",
    '[ -z "$given" ] || export PATH="$given"',
    "unset given",
)


def _start(config: ImageConfig) -> list[str]:
    """ENTRYPOINT takes the arguments, or CMD if there are none; else they are the command."""
    entrypoint = shlex.join(config.entrypoint)
    default = shlex.join(config.cmd)
    if entrypoint:
        given, bare = f'exec {entrypoint} "$@"', f"exec {entrypoint} {default}".rstrip()
    else:
        given, bare = 'exec "$@"', f"exec {default or '/bin/sh'}"
    return ["if [ $# -gt 0 ]; then", f"    {given}", "else", f"    {bare}", "fi"]


def _line(text: str) -> str:
    return " ".join(text.splitlines())
