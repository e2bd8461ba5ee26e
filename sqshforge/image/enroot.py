"""The four files that enroot and pyxis expect in a squash file, made from an image's config."""

from __future__ import annotations

import shlex
import unicodedata
from dataclasses import dataclass, field

from sqshforge.project import NEWEST_EPOCH


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """An image's settings for running it, whatever engine it came from."""

    reference: str
    digest: str | None = None
    created: int = 0  # seconds since 1970
    base_created: int | None = None  # the same, outside of /sqshforge; None: unknown
    size: int = 0  # bytes, unpacked
    layers: tuple[str, ...] = ()  # digests of their tars, the lowest first; empty: unknown
    env: tuple[str, ...] = ()  # NAME=VALUE
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        """Raise `TypeError` for wrong types, `ValueError` for values that no image can have."""
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
            one.encode(errors="surrogateescape")  # raises here if it cannot be written later


# The folder in / that sqshforge's images have beside their packages; no base image has it.
CARRIED = "sqshforge"
# Entries that docker makes in every container, and enroot too: empty files in /etc, mode 0755, a
# link, and the folders /dev, /proc and /sys. The runtime mounts the host's there.
EMPTY = ("hostname", "hosts", "resolv.conf")
MTAB = "/proc/mounts"
# Labels of sqshforge's images: the digest of all inputs of the build, and those that change with
# each build. /etc/rc leaves them out, or it would change with the training code.
OF_BUILD = "io.sqshforge.inputs"
OF_EACH_BUILD = {
    OF_BUILD,
    "org.opencontainers.image.created",
    "org.opencontainers.image.revision",
}


def files(config: ImageConfig) -> dict[str, bytes]:
    """The files by path in the image; all get mode 0644, owner 0:0, and replace the image's own."""
    return {
        "etc/environment": environment(config).encode(errors="surrogateescape"),
        "etc/fstab": fstab(config).encode(errors="surrogateescape"),
        "etc/rc": rc(config).encode(errors="surrogateescape"),
        "etc/rc.local": b"# This file is sourced by /etc/rc when the container starts.\n",
    }


def is_left_out(name: bytes) -> bool:
    """Whether an entry of an image, by its path without a leading slash, is not packed."""
    return name.startswith(b"dev/") or name == b".dockerenv"


def environment(config: ImageConfig) -> str:
    """One NAME=VALUE per line, unquoted, as enroot reads it.

    Values with control characters are left out: one that ends a line would start another variable.
    """
    return "".join(f"{one}\n" for one in config.env if not has_control(one, but="\t"))


def left_out(config: ImageConfig) -> list[str]:
    """The names of the variables that /etc/environment cannot hold."""
    return [one.partition("=")[0] for one in config.env if has_control(one, but="\t")]


def has_control(text: str, but: str = "") -> bool:
    """Whether a text has a control character or a line separator, other than those in `but`."""
    return any(unicodedata.category(one) in _CONTROLS and one not in but for one in text)


_CONTROLS = ("Cc", "Zl", "Zp")


def fstab(config: ImageConfig) -> str:
    r"""Write a bind mount, made at start, for each volume; a space is \040 in an fstab.

    Volumes with control characters were refused before; those of an old record are escaped.
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

    Enroot's own begins with the image's address. An image may have several addresses but must give
    one file, so this script has none.
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


# For an image that has a PATH. A process's initial variables stay in its /proc, separated by NULs;
# a value may have several lines.
_PATH = (
    "# The PATH that this was started with: a login shell's profile may set another.",
    r"given=$({ tr '\n\0' '\1\n' < /proc/$$/environ | sed -n 's/^PATH=//p'; } 2> /dev/null)",
    '[ -z "$given" ] || export PATH="$given"',
    "unset given",
)


def _start(config: ImageConfig) -> list[str]:
    """ENTRYPOINT gets the arguments, or CMD if there are none; without it they are the command."""
    entrypoint = shlex.join(config.entrypoint)
    default = shlex.join(config.cmd)
    if entrypoint:
        given, bare = f'exec {entrypoint} "$@"', f"exec {entrypoint} {default}".rstrip()
    else:
        given, bare = 'exec "$@"', f"exec {default or '/bin/sh'}"
    return ["if [ $# -gt 0 ]; then", f"    {given}", "else", f"    {bare}", "fi"]


def _line(text: str) -> str:
    return " ".join(text.splitlines())
