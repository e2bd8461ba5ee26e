"""A node's report about itself, as typed values.

The reports come from untrusted machines: a value that is missing, of the wrong type or too large
is replaced by the default, which means that nothing is known.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass

LONGEST = 300  # most characters of a text
MOST = 64  # most entries of a list
LARGEST = 2**63


@dataclass(frozen=True)
class Pyxis:
    """Slurm's plugin for containers, according to srun and plugstack.conf."""

    known: bool = False
    fault: str = ""  # error of `srun --help`
    plugin: str = ""
    version: str = ""
    squashfuse: bool = False


@dataclass(frozen=True)
class Place:
    """A folder that enroot uses.

    `above` is the folder itself or its nearest existing parent, which must be writable (`usable`);
    `kind` is the type of its file system.
    """

    name: str = ""
    path: str = ""
    there: bool = False
    above: str = ""
    usable: bool = False
    kind: str = ""
    free: int = 0


@dataclass(frozen=True)
class Enroot:
    """Enroot on a node; an empty path means that there is none."""

    path: str = ""
    version: str = ""
    fault: str = ""
    settings: str = ""
    hook: bool = False
    folders: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Fuse:
    """/dev/fuse, and why it cannot be opened, if so."""

    there: bool = False
    open: bool = False
    mode: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Tools:
    """Paths of programs, empty if missing; for unsquashfs, its version."""

    squashfuse: str = ""
    fuse_overlayfs: str = ""
    unsquashfs: str = ""
    kernel_squashfs: bool = False


@dataclass(frozen=True)
class Setting:
    """A kernel setting."""

    name: str = ""
    value: int = 0


@dataclass(frozen=True)
class Namespaces:
    """Whether a namespace could be made, directly or by enroot, and what may forbid it."""

    works: bool = False
    enroot: bool = False
    fault: str = ""
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Nvidia:
    """GPUs on the PCI bus, the driver's devices, and the tool that passes them to containers."""

    cards: int = 0
    devices: int = 0
    cli: str = ""
    version: str = ""


@dataclass(frozen=True)
class Efa:
    """EFA cards on the PCI bus, those with a driver, their devices; all adapters; libfabric."""

    cards: int = 0
    driven: int = 0
    devices: int = 0
    adapters: int = 0
    libfabric: str = ""


@dataclass(frozen=True)
class Needrestart:
    """Whether needrestart restarts daemons by itself, and whether Slurm's are exempt."""

    there: bool = False
    mode: str = ""
    ubuntu: bool = False
    exempt: bool = False


@dataclass(frozen=True)
class Marker:
    """The digest of the new file in a shared folder, or why it could not be read."""

    digest: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Image:
    """The beginning of an image, as read."""

    size: int = 0
    read: int = 0
    seconds: float = 0.0
    digest: str = ""


@dataclass(frozen=True)
class Fault:
    """A check that failed or did not finish."""

    check: str = ""
    text: str = ""


@dataclass(frozen=True)
class Node:
    """A node's whole report: empty if it has no usable Python."""

    node: str = ""
    nodes: str = ""  # all nodes of its job, in Slurm's notation
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
        """Return why a check gave no result; empty if it did."""
        return next((one.text for one in self.faults if one.check == check), "")


def node(document: object, name: str) -> Node:
    """Read a node from a JSON document; `name` is the one that its lines began with."""
    return dataclasses.replace(_read(Node, document), node=name)


def _read(kind: typing.Any, document: object) -> typing.Any:
    """Read a dataclass from a JSON object, ignoring unknown fields and values of wrong types."""
    values = document if isinstance(document, dict) else {}
    hints = _hints(kind)
    known = {name: _value(hint, values[name]) for name, hint in hints.items() if name in values}
    return kind(**{name: value for name, value in known.items() if value is not None})


@functools.cache
def _hints(kind: typing.Any) -> dict[str, typing.Any]:
    return typing.get_type_hints(kind)


def _value(hint: typing.Any, value: object) -> object | None:
    """Return a value of a field's type; None for a value of another type."""
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_read(inner, one) for one in value[:MOST]) if isinstance(value, list) else None
    if dataclasses.is_dataclass(hint):
        return _read(hint, value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < LARGEST else None  # excludes infinity and nan
    if type(value) is not hint:
        return None
    if isinstance(value, str):
        return value[:LONGEST]
    return value if abs(typing.cast("int", value)) < LARGEST else None
