"""The platforms that images are made for, and their names elsewhere.

Standard library only, for Python 3.9 and later: this module is also in the runtime of images.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sqshforge.errors import RequestError

ELF = b"\x7fELF"
MACHINE_AT = 18  # offset of the processor's number in an ELF file
HEAD = 20  # bytes of an ELF file that include it
LOADED_AT = 0x10000


@dataclass(frozen=True)
class Platform:
    """An operating system and a processor."""

    name: str  # as in images
    machine: str  # as in uname and wheels
    elf: int  # as in ELF files
    ending: bytes  # machine code that ends a process with exit code 0

    @property
    def architecture(self) -> str:
        """The processor's name in images and in Debian."""
        return self.name.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The suffix of names for this platform; empty for the default platform."""
        return "" if self == DEFAULT else f".{self.architecture}"

    @property
    def is_own(self) -> bool:
        """Whether this machine is of this platform."""
        return os.uname().machine == self.machine

    def smallest_program(self) -> bytes:
        """Return a program that only exits, with code 0: 64 bytes of ELF header, 56 of segment."""
        size = 64 + 56 + len(self.ending)
        header = struct.pack(
            "<4s5B7x2HI3QI6H",
            *(ELF, 2, 1, 1, 0, 0),
            *(2, self.elf, 1, LOADED_AT + 120, 64, 0, 0, 64, 56, 1, 64, 0, 0),
        )
        segment = struct.pack("<2I6Q", 1, 5, 0, LOADED_AT, LOADED_AT, size, size, LOADED_AT)
        return header + segment + self.ending


DEFAULT = Platform("linux/amd64", "x86_64", 62, bytes.fromhex("b83c00000031ff0f05"))
ARM = Platform("linux/arm64", "aarch64", 183, bytes.fromhex("000080d2a80b80d2010000d4"))
ALL = {one.name: one for one in (DEFAULT, ARM)}


def own() -> str:
    """Return the name of this machine's platform, even if no recipe supports it."""
    machine = os.uname().machine
    return next((one.name for one in ALL.values() if one.machine == machine), f"linux/{machine}")


def preferred(names: Sequence[str]) -> str:
    """Return this machine's own platform if it is among these, else the first."""
    return own() if own() in names else names[0]


def of_program(head: bytes) -> str:
    """Return a program's platform, by its first `HEAD` bytes; empty if it is not a program."""
    if len(head) < HEAD or not head.startswith(ELF):
        return ""
    (elf,) = struct.unpack_from("<H" if head[5] == 1 else ">H", head, MACHINE_AT)
    known = (one.name for one in ALL.values() if one.elf == elf and head[4] == 2)
    return next(known, f"another machine (ELF number {elf})")


def not_for_this_machine(image: str, built_for: str) -> RequestError:
    """Return the error for an image that this machine cannot start."""
    return RequestError(
        f"the image is for {built_for}, and this machine is {own()}",
        where=image,
        fix="start it on such a machine, or make one for this: make sqsh TARGET=... "
        f"PLATFORM={own()}",
    )
