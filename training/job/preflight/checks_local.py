"""What a node finds on itself, with nobody else: its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from training.job.plan import Plan
from training.job.preflight import checks_accelerator, efa, neuron, space, versions
from training.job.preflight.checks_network import Shared
from training.job.preflight.finding import PATIENCE, Finding, Report, check
from training.job.preflight.workers import Crew

Look = Callable[[], tuple[str, list[str]]]


def look(
    plan: Plan,
    environment: Mapping[str, str],
    crew: Crew,
    shared: Shared | None,
    nonce: str,
    seconds: float,
    root: Path,
) -> Report:
    """Run this node's own checks within `seconds`; one that hangs is a fault of the node."""
    until = time.monotonic() + seconds

    def left() -> float:
        return max(1.0, until - time.monotonic())

    def run(name: str, work: Look) -> Finding:
        return check(name, work, min(PATIENCE, left()))

    def write() -> tuple[str, list[str]]:
        return shared.write(nonce) if shared else ("CHECKPOINTS is not set: not tried", [])

    folder = run("folder", write)
    room = run("space", lambda: space.look(root, environment))
    card = run("efa", lambda: efa.look(root, environment))
    driver = run("driver", lambda: _driver(plan, environment, root))
    # By now the crew has loaded torch, or soon will have.
    probes: list[dict[str, Any]] = [{}]

    def use() -> tuple[str, list[str]]:
        probes[:] = crew.ask([{"do": "probe"}] * crew.size, left())
        return _used(probes, checks_accelerator.present(root, environment))

    devices = check("devices", use, left() + PATIENCE)
    inside = Finding("inside", 0.0, "not tried")
    if not devices.faults:
        inside = check("inside", lambda: _inside(crew, left()), left() + PATIENCE)
    first: dict[str, Any] = probes[0]
    same: dict[str, str] = {}

    def read() -> tuple[str, list[str]]:
        same.update(versions.read(root, environment, first))
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
        # gloo joins each with each: one of a node is enough for the network between nodes.
        crew=crew.size if backend == "nccl" else 1,
        wrote=shared is not None and not folder.faults,
    )


def _driver(plan: Plan, environment: Mapping[str, str], root: Path) -> tuple[str, list[str]]:
    if checks_accelerator.present(root, environment):
        return checks_accelerator.look(environment)
    if neuron.chips(root):
        return neuron.look(root, environment, plan.processes)
    return "no accelerator", []


def _used(probes: list[dict[str, Any]], gpus: bool) -> tuple[str, list[str]]:
    """Judge what the crew says of the devices that it has used."""
    faults = [
        f"process {rank}: {one['fault']}" for rank, one in enumerate(probes) if "fault" in one
    ]
    first = probes[0]
    if gpus and first.get("backend") == "gloo" and first.get("cuda"):
        faults.append("there are GPUs in /dev, and torch cannot use them")
    return f"{len(probes)} x {first.get('accelerator', '?')}", faults


def _inside(crew: Crew, seconds: float) -> tuple[str, list[str]]:
    """Let the processes of this node compute together."""
    with TemporaryDirectory(prefix="preflight-", ignore_cleanup_errors=True) as folder:
        order = {
            "do": "reduce",
            "store": [f"{folder}/store"],
            "name": "inside",
            "world": crew.size,
            "seconds": 0.4 * seconds,
        }
        answers = crew.ask([{**order, "rank": rank} for rank in range(crew.size)], seconds)
    faults = [f"process {i}: {one['fault']}" for i, one in enumerate(answers) if "fault" in one]
    return f"{crew.size} processes", faults
