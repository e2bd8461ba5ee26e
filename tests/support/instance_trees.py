"""Folders that look to training.launch like the /dev, /sys, /proc and /opt of EC2 instances.

`python -m tests.support.instance_trees` regenerates tests/golden/launch/TYPE.txt for every type of
the table.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from training import launch
from training.job.machine import ulimits
from training.job.machine.instances import TYPES, Instance
from training.job.machine.ulimits import INFINITE, KINDS, Limit

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
PROCESSORS = {  # threads, two per core
    "xlarge": 4,
    "2xlarge": 8,
    "4xlarge": 16,
    "8xlarge": 32,
    "12xlarge": 48,
    "16xlarge": 64,
    "24xlarge": 96,
    "32xlarge": 128,
    "48xlarge": 192,
}
CURRENT = {"installer": "1.48.0", "libfabric": "2.4.0amzn3.0", "plugin": "1.19.0"}
LIMITS = tuple(Limit(name, 8, INFINITE) for name in KINDS)
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "MASTER_ADDR": "127.0.0.1",
    "CHECKPOINTS": "/fsx/run",
}


def write(path: Path, text: str = "") -> None:
    """Write a file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def dmi(root: Path, vendor: str, product: str) -> None:
    """Add the strings that the firmware reports."""
    write(root / "sys/devices/virtual/dmi/id/sys_vendor", vendor)
    write(root / "sys/devices/virtual/dmi/id/product_name", product)


@functools.cache
def cores(threads: int) -> tempfile.TemporaryDirectory[str]:
    """Make a folder of cores that all nodes share: writing 192 for each takes seconds."""
    folder = tempfile.TemporaryDirectory(prefix="cores-")
    half = threads // 2
    for core in range(threads):
        twins = f"{core % half},{core % half + half}"
        write(Path(folder.name, f"cpu{core}/topology/thread_siblings_list"), twins)
    return folder


def processors(root: Path, threads: int, nodes: int) -> None:
    """Add cores of two threads, n and n + threads / 2, in NUMA nodes of equal size."""
    half = threads // 2
    size = half // nodes
    for number in range(nodes):
        first, last = number * size, (number + 1) * size - 1
        listed = f"{first}-{last},{first + half}-{last + half}"
        write(root / f"sys/devices/system/node/node{number}/cpulist", listed)
    (root / "sys/devices/system/cpu").symlink_to(cores(threads).name)


def gpu(root: Path, number: int, numa: int, *, driver: bool = True) -> None:
    """Add a GPU: its device, its PCI address, and what the driver reports."""
    place = f"0000:{16 + number:02x}:1c.0"
    write(root / f"dev/nvidia{number}")
    write(root / f"sys/bus/pci/devices/{place}/vendor", "0x10de")
    write(root / f"sys/bus/pci/devices/{place}/class", "0x030200")
    write(root / f"sys/bus/pci/devices/{place}/numa_node", str(numa))
    if driver:
        information = f"Model: \t NVIDIA\nGPU UUID: \t GPU-{number}a6b\nDevice Minor: \t {number}"
        write(root / f"proc/driver/nvidia/gpus/{place}/information", information)


def chip(root: Path, number: int, numa: int, cores: int) -> None:
    """Add a Neuron chip."""
    write(root / f"dev/neuron{number}")
    write(root / f"sys/class/neuron_device/neuron{number}/core_count", str(cores))
    write(root / f"sys/class/neuron_device/neuron{number}/device/numa_node", str(numa))


def card(root: Path, number: int, vendor: str = "0x1d0f") -> None:
    """Add a network card."""
    write(root / f"sys/class/infiniband/rdmap{number}s0/device/vendor", vendor)


def software(root: Path, *, installer: str, libfabric: str, plugin: str) -> None:
    """Add EFA's installer, libfabric, aws-ofi-nccl with its tuner, and NCCL 2.28.9."""
    listed = f"# EFA installer version: {installer}\nlibfabric1-aws_{libfabric}_amd64.deb"
    write(root / "opt/amazon/efa_installed_packages", listed)
    write(root / "opt/amazon/efa/lib/pkgconfig/libfabric.pc", f"Version: {libfabric}")
    library = root / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
    write(library, f"\0NET/OFI Initializing aws-ofi-nccl {plugin}\0")
    library.with_name("libnccl-ofi-tuner.so").symlink_to(library.name)
    write(root / "opt/nccl/lib/libnccl.so.2.28.9")
    (root / "opt/nccl/lib/libnccl.so.2").symlink_to("libnccl.so.2.28.9")
    write(root / "proc/sys/kernel/osrelease", "6.8.0-1021-aws")


def threads(type: str) -> int:
    """Return the number of an instance's processors."""
    return PROCESSORS[type.partition(".")[2]]


def instance(root: Path, what: Instance) -> None:
    """Make a whole node of a type, with current software."""
    nodes = 2 if threads(what.type) >= 96 else 1
    (root / "dev").mkdir(parents=True)
    dmi(root, "Amazon EC2", what.type)
    processors(root, threads(what.type), nodes)
    for number in range(what.count):
        numa = number * nodes // what.count
        if what.chip.cores:
            chip(root, number, numa, what.chip.cores)
        else:
            gpu(root, number, numa)
    for number in range(what.fabric.efa):
        card(root, number)
    if what.fabric.efa:
        software(root, **CURRENT)


def printed(root: Path, cores: int, environment: dict[str, str], words: Sequence[str] = ()) -> str:
    """Return what `--print-env` prints on a node that looks like this folder."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        patch.setattr(ulimits, "current_limits", lambda: LIMITS)
        assert launch.main(["--print-env", *words, "--"], root) == 0
    return out.getvalue()


def golden(root: Path, what: Instance) -> str:
    """Return the decisions of a node of a type, the first of two."""
    instance(root, what)
    module = "training.mamba2_neuron" if what.chip.cores else "training.mamba_fsdp"
    environment = (
        SLURM if what.chip.cores else {**SLURM, "LD_PRELOAD": "/opt/nccl/lib/libnccl.so.2"}
    )
    return printed(root, threads(what.type), environment, ["--module", module])


if __name__ == "__main__":
    for one in TYPES.values():
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{one.type}.txt").write_text(golden(Path(folder) / "root", one))
