"""Accelerators and network cards as /dev, /sys and /proc show them, and where they are."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from training.job.files import content

NVIDIA, AMAZON = "0x10de", "0x1d0f"  # vendors of PCI
GPU_CLASSES = ("0x0300", "0x0302")  # PCI's display and 3D controllers
UNKNOWN = -1  # a NUMA node that nobody tells
PATIENCE = 20  # seconds for neuron-ls


@dataclass(frozen=True)
class Gpu:
    """A GPU, in the order of PCI, which is CUDA's for equal ones."""

    uuid: str  # empty: not told
    numa: int


def nodes_of(root: Path, name: str) -> int:
    """Count a driver's devices in /dev: nvidia0, nvidia1, ... or neuron0, ..."""
    with contextlib.suppress(OSError):
        return sum(1 for one in (root / "dev").iterdir() if re.fullmatch(rf"{name}\d+", one.name))
    return 0


def gpus(root: Path) -> list[Gpu]:
    """List NVIDIA's GPUs; empty where neither their driver nor PCI shows them."""
    told = {one.parent.name: content(one) for one in (root / _PROC).glob("*/information")}
    if told:
        return [
            Gpu(uuid=_line(text, "GPU UUID"), numa=_numa(root, place))
            for place, text in sorted(told.items())
        ]
    return [
        Gpu(uuid="", numa=_numa(root, one.name))
        for one in sorted((root / _PCI).glob("*"))
        if content(one / "vendor") == NVIDIA and content(one / "class").startswith(GPU_CLASSES)
    ]


def cores_of_chip(root: Path) -> int:
    """Ask Neuron's driver for the physical cores of a chip; 0 if it does not say."""
    text = content(root / _NEURON / "neuron0" / "core_count")
    return int(text) if text.isdecimal() else 0


def chips(root: Path, programs: str) -> list[int]:
    """List the NUMA nodes of Neuron's chips, in the driver's order, which is not that of PCI.

    The driver tells it by itself, or neuron-ls, which is looked for in `programs`, a PATH.
    """
    count = nodes_of(root, "neuron")
    own = [content(root / _NEURON / f"neuron{n}" / "device" / "numa_node") for n in range(count)]
    if count and all(own):
        return [int(text) for text in own]
    program = shutil.which("neuron-ls", path=programs)
    if not count or program is None:
        return [UNKNOWN] * count
    try:
        done = subprocess.run(
            [program, "--json-output"], capture_output=True, text=True, timeout=PATIENCE
        )
        told = {one["neuron_device"]: str(one["bdf"]) for one in json.loads(done.stdout)}
        return [_numa(root, told[number]) for number in range(count)]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return [UNKNOWN] * count


def efa(root: Path) -> int | None:
    """Count the EFA cards; None if no driver of such cards shows itself."""
    try:
        found = list((root / "sys/class/infiniband").iterdir())
    except OSError:
        return None
    return sum(1 for one in found if _is_efa(one / "device"))


_PCI = Path("sys/bus/pci/devices")
_PROC = Path("proc/driver/nvidia/gpus")
_NEURON = Path("sys/class/neuron_device")


def _is_efa(device: Path) -> bool:
    driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
    return driver == "efa" or content(device / "vendor") == AMAZON


def _numa(root: Path, place: str) -> int:
    """The NUMA node of a place of PCI, with its domain or without."""
    full = place if place.count(":") == 2 else f"0000:{place}"
    text = content(root / _PCI / full.lower() / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else UNKNOWN


def _line(text: str, name: str) -> str:
    """The value of a line `name: value`."""
    found = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""
