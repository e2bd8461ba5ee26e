"""What /dev, /sys and /proc show: accelerators, network cards and cores, and where they are."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.job.types import file_text

NVIDIA, AMAZON = "0x10de", "0x1d0f"  # PCI vendors
GPU_CLASSES = ("0x0300", "0x0302")  # PCI's display and 3D controllers
UNKNOWN = -1  # the NUMA node is not known
TIMEOUT = 20  # seconds for neuron-ls

CPU, NODE = Path("sys/devices/system/cpu"), Path("sys/devices/system/node")
_PCI = Path("sys/bus/pci/devices")
_PROC = Path("proc/driver/nvidia/gpus")
_NEURON = Path("sys/class/neuron_device")


@dataclass(frozen=True)
class Gpu:
    """A GPU. They are in PCI order, which is CUDA's for equal ones."""

    uuid: str  # empty: not known
    numa: int


def count_devices(root: Path, name: str) -> int:
    """Count a driver's devices in /dev: nvidia0, nvidia1, ... or neuron0, ..."""
    with contextlib.suppress(OSError):
        return sum(1 for one in (root / "dev").iterdir() if re.fullmatch(rf"{name}\d+", one.name))
    return 0


def named_gpus(text: str) -> list[str]:
    """Split CUDA_VISIBLE_DEVICES as CUDA does: only words before the first invalid one count.

    Nothing is left of -1, nor of NoDevFiles, which older Slurm gives a job without GPUs.
    """
    words = (word.strip() for word in text.split(","))
    return list(itertools.takewhile(re.compile(r"[0-9]+$|GPU-|MIG-").match, words))


def list_gpus(root: Path) -> list[Gpu]:
    """List NVIDIA's GPUs; empty if neither their driver nor PCI shows any."""
    found = {one.parent.name: file_text(one) for one in (root / _PROC).glob("*/information")}
    if found:
        return [
            Gpu(uuid=_line(text, "GPU UUID"), numa=_numa(root, place))
            for place, text in sorted(found.items())
        ]
    return [
        Gpu(uuid="", numa=_numa(root, one.name))
        for one in sorted((root / _PCI).glob("*"))
        if file_text(one / "vendor") == NVIDIA and file_text(one / "class").startswith(GPU_CLASSES)
    ]


def cores_of_chip(root: Path) -> int:
    """Ask Neuron's driver for the physical cores of a chip; 0 if it does not say."""
    text = file_text(root / _NEURON / "neuron0" / "core_count")
    return int(text) if text.isdecimal() else 0


def places_of_chips(root: Path, programs: str) -> list[int]:
    """List the NUMA nodes of Neuron's chips, in the driver's order, which is not PCI's.

    The driver itself tells them, or else neuron-ls, which is looked for in `programs`, a PATH.
    """
    count = count_devices(root, "neuron")
    own = [file_text(root / _NEURON / f"neuron{n}" / "device" / "numa_node") for n in range(count)]
    if count and all(own):
        return [int(text) for text in own]
    program = shutil.which("neuron-ls", path=programs)
    if not count or program is None:
        return [UNKNOWN] * count
    try:
        done = subprocess.run(
            [program, "--json-output"], capture_output=True, text=True, timeout=TIMEOUT
        )
        addresses = {one["neuron_device"]: str(one["bdf"]) for one in json.loads(done.stdout)}
        return [_numa(root, addresses[number]) for number in range(count)]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return [UNKNOWN] * count


def count_efa(root: Path) -> int | None:
    """Count the EFA cards; None if no driver of such cards is visible."""
    try:
        found = list((root / "sys/class/infiniband").iterdir())
    except OSError:
        return None
    return sum(1 for one in found if _is_efa(one / "device"))


def _is_efa(device: Path) -> bool:
    driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
    return driver == "efa" or file_text(device / "vendor") == AMAZON


def _numa(root: Path, place: str) -> int:
    """The NUMA node of a PCI address, which may come without its domain."""
    full = place if place.count(":") == 2 else f"0000:{place}"
    text = file_text(root / _PCI / full.lower() / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else UNKNOWN


def _line(text: str, name: str) -> str:
    """The value of a line `name: value`."""
    found = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def parse_cores(text: str) -> tuple[int, ...]:
    """Read a list of cores: `0-2,8` is 0, 1, 2, 8. Raises ValueError."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def format_cores(cores: Iterable[int]) -> str:
    """Write a list of cores as the kernel does: the inverse of `parse_cores`."""
    runs = itertools.groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])
    spans = [[core for _, core in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in spans)


def cores_by_numa_node(root: Path, allowed: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Look up the cores of each NUMA node that this task may use; omit a node without any.

    root: where /sys is looked for. The two threads of a core stand side by side, so that a slice of
    the list has whole cores.
    """
    found = {}
    for folder in (root / NODE).glob("node[0-9]*"):
        own = set(parse_cores(file_text(folder / "cpulist"))) & set(allowed)
        if own:
            number = int(re.sub(r"\D", "", folder.name))
            found[number] = tuple(sorted(own, key=lambda core: (_first_thread(root, core), core)))
    return dict(sorted(found.items()))


def _first_thread(root: Path, core: int) -> int:
    """The lowest number among the threads of a core."""
    threads = parse_cores(
        file_text(root / CPU / f"cpu{core}" / "topology" / "thread_siblings_list")
    )
    return min(threads, default=core)


def share_cores(
    domains: Mapping[int, Sequence[int]], places: Sequence[int], processes: int
) -> list[tuple[int, ...]]:
    """Share the cores of each NUMA node among the processes whose accelerators are there.

    domains: the cores of each NUMA node, the threads of a core side by side; places: the NUMA node
    of each process's accelerator. Empty if there is nothing to choose, not all is known, or a NUMA
    node has more processes than cores.
    """
    near = list(places[:processes])
    if len(domains) < 2 or len(near) < processes or not set(near) <= domains.keys():
        return []
    if any(near.count(place) > len(domains[place]) for place in near):
        return []
    found = []
    for number, place in enumerate(near):
        cores, among = domains[place], near.count(place)
        mine = near[:number].count(place)
        first, end = mine * len(cores) // among, (mine + 1) * len(cores) // among
        found.append(tuple(cores[first:end]))
    return found
