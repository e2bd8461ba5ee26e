"""What a node reports of itself, as values.

It comes from machines that nobody vouches for: what is missing there, of another type or without
end has the value that says that nothing is known.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass

LONGEST = 300  # characters of a text
MOST = 64  # entries of a list
LARGEST = 2**63


@dataclass(frozen=True)
class Pyxis:
    """Slurm's plugin for containers: what srun knows, and what plugstack.conf has."""

    known: bool = False
    fault: str = ""  # of `srun --help`
    plugin: str = ""
    version: str = ""
    squashfuse: bool = False


@dataclass(frozen=True)
class Place:
    """A folder of enroot's: where, what must be writable for it, and on what it is."""

    name: str = ""
    path: str = ""
    there: bool = False
    above: str = ""
    usable: bool = False
    kind: str = ""
    free: int = 0


@dataclass(frozen=True)
class Enroot:
    """Enroot on a node; without a path there is none."""

    path: str = ""
    version: str = ""
    fault: str = ""
    settings: str = ""
    hook: bool = False
    folders: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Fuse:
    """/dev/fuse, and why it cannot be opened."""

    there: bool = False
    open: bool = False
    mode: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Tools:
    """Paths of programs, empty where they are not there; the version of unsquashfs."""

    squashfuse: str = ""
    fuse_overlayfs: str = ""
    unsquashfs: str = ""
    kernel_squashfs: bool = False


@dataclass(frozen=True)
class Setting:
    """One of the kernel's."""

    name: str = ""
    value: int = 0


@dataclass(frozen=True)
class Namespaces:
    """Whether one could be made, or by enroot's own program, and what might forbid it."""

    works: bool = False
    enroot: bool = False
    fault: str = ""
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Nvidia:
    """GPUs at PCI, those of the driver, and what gives them to containers."""

    cards: int = 0
    devices: int = 0
    cli: str = ""
    version: str = ""


@dataclass(frozen=True)
class Efa:
    """Cards at PCI, those of the driver, their devices; adapters of any maker; libfabric."""

    cards: int = 0
    driven: int = 0
    devices: int = 0
    adapters: int = 0
    libfabric: str = ""


@dataclass(frozen=True)
class Needrestart:
    """Whether it restarts daemons by itself, and leaves Slurm's alone."""

    there: bool = False
    mode: str = ""
    ubuntu: bool = False
    exempt: bool = False


@dataclass(frozen=True)
class Marker:
    """What a shared folder's new file has in it, or why it was not read."""

    digest: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Image:
    """The beginning of an image, as it was read."""

    size: int = 0
    read: int = 0
    seconds: float = 0.0
    digest: str = ""


@dataclass(frozen=True)
class Fault:
    """A check that gave nothing."""

    check: str = ""
    text: str = ""


@dataclass(frozen=True)
class Node:
    """All that a node reported: nothing where it has no usable Python."""

    node: str = ""
    nodes: str = ""  # of its job, in Slurm's notation
    uid: int = 0
    python: str = ""
    kernel: str = ""
    installer: str = ""
    memlock: int = -1
    pyxis: Pyxis = Pyxis()
    enroot: Enroot = Enroot()
    fuse: Fuse = Fuse()
    programs: Tools = Tools()
    namespaces: Namespaces = Namespaces()
    nvidia: Nvidia = Nvidia()
    efa: Efa = Efa()
    needrestart: Needrestart = Needrestart()
    markers: tuple[Marker, ...] = ()
    image: Image = Image()
    faults: tuple[Fault, ...] = ()

    def fault(self, check: str) -> str:
        """Why a check gave nothing; empty where it did."""
        return next((one.text for one in self.faults if one.check == check), "")


def node(document: object, name: str) -> Node:
    """A node out of a JSON document, by the name that its lines had."""
    return dataclasses.replace(_read(Node, document), node=name)


def _read(kind: typing.Any, document: object) -> typing.Any:
    """A dataclass out of a JSON object, as far as the one has fields of the other's types."""
    values = document if isinstance(document, dict) else {}
    hints = _hints(kind)
    known = {name: _value(hint, values[name]) for name, hint in hints.items() if name in values}
    return kind(**{name: value for name, value in known.items() if value is not None})


@functools.cache
def _hints(kind: typing.Any) -> dict[str, typing.Any]:
    return typing.get_type_hints(kind)


def _value(hint: typing.Any, value: object) -> object | None:
    """A value of the type that a field has; None for one of another type."""
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_read(inner, one) for one in value[:MOST]) if isinstance(value, list) else None
    if dataclasses.is_dataclass(hint):
        return _read(hint, value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < LARGEST else None  # not so with infinity and nan
    if type(value) is not hint:
        return None
    if isinstance(value, str):
        return value[:LONGEST]
    return value if abs(typing.cast("int", value)) < LARGEST else None
