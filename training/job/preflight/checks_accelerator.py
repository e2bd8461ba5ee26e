"""What the drivers report of accelerators: nvidia-smi of GPUs, neuron-ls of Trainium chips."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from training.job.machine.devices import count_devices, named_gpus

SMI_TIMEOUT = 60
"""Seconds for nvidia-smi: without the persistence daemon it starts each GPU first."""

NEURON_TOOLS = "/opt/aws/neuron/bin"
NEURON_LS_TIMEOUT = 20
"""Seconds for neuron-ls."""


_GPU_FLAGS = {
    "remapped_rows/remapped_row_pending": "memory rows wait for a reset to be remapped",
    "remapped_rows/remapped_row_failure": "memory rows could not be remapped",
    "retired_pages/pending_retirement": "memory pages wait for a reset to be retired",
    "retired_pages/pending_blacklist": "memory pages wait for a reset to be retired",
    "ecc_errors/aggregate/sram_threshold_exceeded": "more errors of its SRAM than it may have",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU of the node, as the driver lists it."""

    index: int
    uuid: str
    name: str
    faults: tuple[str, ...]


def has_gpus(root: Path, environment: Mapping[str, str]) -> bool:
    """Tell whether this task has GPUs, counted as in training.job.node."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return (named is None or bool(named_gpus(named))) and count_devices(root, "nvidia") > 0


def check_gpus(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Report faults of the GPUs that this task may use.

    Raises OSError if nvidia-smi cannot be started.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return "no nvidia-smi to ask", []
    try:
        done = subprocess.run(
            [program, "-q", "-x"], env=environment, capture_output=True, timeout=SMI_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "", [f"nvidia-smi gives no answer within {SMI_TIMEOUT} s"]
    said = (done.stdout + done.stderr).decode(errors="replace")
    try:
        gpus = read_gpus(done.stdout)
    except ElementTree.ParseError:
        gpus = []
    if done.returncode or not gpus:
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        return "", [f"nvidia-smi ends with exit code {done.returncode} and says: {first[:200]}"]
    used = visible_gpus(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    faults = [f"GPU {gpu.index} ({gpu.uuid}): {fault}" for gpu in used for fault in gpu.faults]
    return f"{len(used)} GPUs asked", faults


def read_gpus(document: bytes) -> list[Gpu]:
    """Parse the output of `nvidia-smi -q -x`. Raises ElementTree.ParseError."""
    log = ElementTree.fromstring(document)
    return [
        Gpu(
            index=index,
            uuid=one.findtext("uuid", "").strip(),
            name=one.findtext("product_name", "").strip(),
            faults=tuple(_gpu_faults(one)),
        )
        for index, one in enumerate(log.iter("gpu"))
    ]


def visible_gpus(gpus: Sequence[Gpu], named: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number or by the beginning of their UUID."""
    if named is None:
        return list(gpus)
    words = named_gpus(named)
    return [
        gpu
        for gpu in gpus
        if any(word == str(gpu.index) or gpu.uuid.startswith(word) for word in words)
    ]


def _gpu_faults(gpu: ElementTree.Element) -> list[str]:
    """List a GPU's faults. Fields that its driver does not have are absent or N/A."""
    found = []
    # Since the driver was loaded; older drivers call uncorrectable errors double-bit errors.
    counts = {one.tag: one.text for one in gpu.findall("ecc_errors/volatile/*")}
    counts["double_bit"] = gpu.findtext("ecc_errors/volatile/double_bit/total")
    for name, count in counts.items():
        number = (count or "").strip()
        if ("uncorrectable" in name or name == "double_bit") and number.isdecimal() and int(number):
            found.append(f"{number} memory errors that ECC could not correct ({name})")
    for place, what in _GPU_FLAGS.items():
        if gpu.findtext(place, "").strip() == "Yes":
            found.append(what)
    action = gpu.findtext("gpu_recovery_action", "").strip()
    if action not in ("", "None", "N/A"):
        found.append(f"the driver asks for its recovery: {action}")
    return found


def count_chips(root: Path) -> int:
    """Count the chips by their device files."""
    return sum(1 for one in (root / "dev").iterdir() if re.fullmatch(r"neuron\d+", one.name))


def check_chips(
    root: Path, environment: Mapping[str, str], processes: int
) -> tuple[str, list[str]]:
    """Compare the chips in /dev with those that neuron-ls sees, and count memory errors.

    Raises OSError if neuron-ls cannot be started.
    """
    count = count_chips(root)
    faults = _memory_errors(root)
    program = shutil.which("neuron-ls", path=f"{environment.get('PATH', '')}:{NEURON_TOOLS}")
    if program is None:
        return f"{count} Neuron chips, no neuron-ls to ask", faults
    try:
        done = subprocess.run(
            [program, "--json-output"],
            env=environment,
            capture_output=True,
            timeout=NEURON_LS_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "", [*faults, f"neuron-ls gives no answer within {NEURON_LS_TIMEOUT} s"]
    try:
        seen = json.loads(done.stdout)
        cores = sum(int(one["nc_count"]) for one in seen)
    except (ValueError, KeyError, TypeError):
        said = (done.stdout + done.stderr).decode(errors="replace").split("\n")[0][:200]
        return "", [*faults, f"neuron-ls ends with exit code {done.returncode} and says: {said}"]
    if len(seen) != count:
        faults.append(f"neuron-ls sees {len(seen)} chips, /dev has {count}")
    if processes > cores:
        faults.append(f"{cores} cores for {processes} processes")
    return f"{count} Neuron chips, {cores} cores", faults


def _memory_errors(root: Path) -> list[str]:
    """Memory errors since the driver was loaded. Drivers keep the counts in different folders."""
    found = []
    for chip in sorted((root / "sys/devices/virtual/neuron_device").glob("neuron*")):
        for name in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
            for place in (*chip.rglob(f"{name}/total"), *chip.rglob(name)):
                text = place.read_text().strip() if place.is_file() else ""
                if text.isdecimal() and int(text):
                    found.append(f"{chip.name}: {text} memory errors not corrected ({name})")
    return found
