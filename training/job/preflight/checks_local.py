"""The checks that a node runs on its own, which make its report."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import training
from training.job.plan import Plan
from training.job.preflight import checks_accelerator, checks_network
from training.job.preflight.checks_network import SharedFolder
from training.job.preflight.finding import TIMEOUT, Finding, Report, run_check
from training.job.preflight.workers import Workers

Check = Callable[[], tuple[str, list[str]]]

MIB = 1 << 20
LEAST_FREE = {"temporary": 256 * MIB, "memory": 64 * MIB}
"""Free bytes without which nothing can run: for compiled kernels and logs; Docker's default size of
/dev/shm. Whether that is enough for NCCL is shown by its all-reduce."""

LOCK = "sqshforge/meta/lock.json"  # what the image was made from
DRIVERS = ("nvidia", "efa", "neuron")  # kernel modules
NO_VERSION = "none"


def check_node(
    plan: Plan,
    environment: Mapping[str, str],
    workers: Workers,
    shared: SharedFolder | None,
    nonce: str,
    seconds: float,
    root: Path,
) -> Report:
    """Run this node's own checks within `seconds`; one that hangs is a fault of the node."""
    until = time.monotonic() + seconds

    def left() -> float:
        return max(1.0, until - time.monotonic())

    def run(name: str, work: Check, limit: float = TIMEOUT) -> Finding:
        return run_check(name, work, min(limit, left()))

    def write() -> tuple[str, list[str]]:
        return shared.write(nonce) if shared else ("CHECKPOINTS is not set: not tried", [])

    folder = run("folder", write)
    room = run("space", lambda: check_space(root, environment))
    card = run("efa", lambda: checks_network.check_efa(root, environment))
    # A little longer than nvidia-smi may take: its own timeout, which names it, comes first.
    asked = checks_accelerator.SMI_TIMEOUT + 5
    driver = run("driver", lambda: _driver(plan, environment, root), asked)
    # By now the workers have loaded torch, or soon will.
    probes: list[dict[str, Any]] = [{}]

    def use() -> tuple[str, list[str]]:
        probes[:] = workers.ask([{"do": "probe"}] * workers.size, left())
        return _used(probes, checks_accelerator.has_gpus(root, environment))

    devices = run_check("devices", use, left() + TIMEOUT)
    inside = Finding("inside", 0.0, "not tried")
    if not devices.faults:
        inside = run_check("inside", lambda: _inside(workers, left()), left() + TIMEOUT)
    first: dict[str, Any] = probes[0]
    same: dict[str, str] = {}

    def read() -> tuple[str, list[str]]:
        same.update(read_versions(root, environment, first))
        same["accelerators"] = f"{first.get('devices') or 0} x {first.get('accelerator', '?')}"
        same["processes"] = str(plan.processes)
        return ", ".join(f"{name} {same[name]}" for name in ("python", "torch", "training")), []

    known = run("versions", read)
    able = not devices.faults and not inside.faults
    backend = str(first.get("backend", "")) if able else ""
    return Report(
        rank=plan.job.node_rank,
        name=environment.get("SLURMD_NODENAME", ""),
        findings=(driver, devices, card, folder, room, known, inside),
        versions=same,
        backend=backend,
        # gloo joins each with each: one process a node is enough for the network between nodes.
        processes=workers.size if backend == "nccl" else 1,
        wrote=shared is not None and not folder.faults,
    )


def _driver(plan: Plan, environment: Mapping[str, str], root: Path) -> tuple[str, list[str]]:
    if checks_accelerator.has_gpus(root, environment):
        return checks_accelerator.check_gpus(environment)
    if checks_accelerator.count_chips(root):
        return checks_accelerator.check_chips(root, environment, plan.processes)
    return "no accelerator", []


def _used(probes: list[dict[str, Any]], gpus: bool) -> tuple[str, list[str]]:
    """Judge what the workers report of the devices that they have used."""
    faults = [
        f"process {rank}: {one['fault']}" for rank, one in enumerate(probes) if "fault" in one
    ]
    first = probes[0]
    if gpus and first.get("backend") == "gloo" and first.get("cuda"):
        faults.append("there are GPUs in /dev, and torch cannot use them")
    return f"{len(probes)} x {first.get('accelerator', '?')}", faults


def _inside(workers: Workers, seconds: float) -> tuple[str, list[str]]:
    """Have the processes of this node compute together."""
    with TemporaryDirectory(prefix="preflight-", ignore_cleanup_errors=True) as folder:
        order = {
            "do": "reduce",
            "store": [f"{folder}/store"],
            "name": "inside",
            "world": workers.size,
            "seconds": 0.4 * seconds,
        }
        answers = workers.ask([{**order, "rank": rank} for rank in range(workers.size)], seconds)
    faults = [f"process {i}: {one['fault']}" for i, one in enumerate(answers) if "fault" in one]
    return f"{workers.size} processes", faults


def check_space(root: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Report folders that are nearly full or read-only. Raises OSError for a missing folder."""
    places = {
        "temporary": Path(environment.get("TMPDIR") or "/tmp"),
        "memory": root / "dev/shm",
    }
    sizes, faults = [], []
    for what, place in places.items():
        free = shutil.disk_usage(place).free
        sizes.append(f"{place} {_size(free)}")
        if free < LEAST_FREE[what]:
            faults.append(f"{place} has {_size(free)} free, less than {_size(LEAST_FREE[what])}")
        elif not os.access(place, os.W_OK):
            faults.append(f"{place} cannot be written to")
    return ", ".join(sizes), faults


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / MIB:.0f} MiB"


def read_versions(
    root: Path, environment: Mapping[str, str], probe: Mapping[str, str]
) -> dict[str, str]:
    """Collect versions; `probe` has torch's, from a process that has loaded it."""
    lock = root / LOCK
    found = {
        "python": platform.python_version(),
        **{name: probe.get(name, "") for name in ("torch", "cuda", "nccl")},
        "libfabric": checks_network.libfabric_version(environment),
        "image": _digest(lock.read_bytes()) if lock.is_file() else "",
        "training": _digest(_sources(Path(training.__file__).parent)),
    }
    for driver in DRIVERS:
        place = root / "sys/module" / driver / "version"
        found[f"{driver} driver"] = place.read_text().strip() if place.is_file() else ""
    return {name: value or NO_VERSION for name, value in found.items()}


def _sources(folder: Path) -> bytes:
    """Join every source of the package with its name, in a fixed order."""
    parts = []
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes()
        parts.append(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return b"".join(parts)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
