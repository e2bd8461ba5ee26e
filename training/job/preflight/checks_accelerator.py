"""What NVIDIA's driver says of the GPUs, by nvidia-smi."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PATIENCE = 60
"""Seconds for nvidia-smi: without the persistence daemon it starts each GPU first."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of the node, as the driver lists it."""

    index: int
    uuid: str
    name: str
    faults: tuple[str, ...]


def present(root: Path, environment: Mapping[str, str]) -> bool:
    """Tell whether this task has GPUs: as training.job.node counts them."""
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(re.fullmatch(r"nvidia\d+", one.name) for one in (root / "dev").iterdir())


def look(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Say which of the GPUs that this task may use are ill.

    Raises OSError if nvidia-smi cannot be started.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return "no nvidia-smi to ask", []
    try:
        done = subprocess.run(
            [program, "-q", "-x"], env=environment, capture_output=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return "", [f"nvidia-smi gives no answer within {PATIENCE} s"]
    said = (done.stdout + done.stderr).decode(errors="replace")
    try:
        gpus = read(done.stdout)
    except ElementTree.ParseError:
        gpus = []
    if done.returncode or not gpus:
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        return "", [f"nvidia-smi ends with exit code {done.returncode} and says: {first[:200]}"]
    used = visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    faults = [f"GPU {gpu.index} ({gpu.uuid}): {fault}" for gpu in used for fault in gpu.faults]
    return f"{len(used)} GPUs asked", faults


def read(document: bytes) -> list[Gpu]:
    """Read what `nvidia-smi -q -x` prints. Raises ElementTree.ParseError."""
    log = ElementTree.fromstring(document)
    return [
        Gpu(
            index=index,
            uuid=one.findtext("uuid", "").strip(),
            name=one.findtext("product_name", "").strip(),
            faults=tuple(_faults(one)),
        )
        for index, one in enumerate(log.iter("gpu"))
    ]


def visible(gpus: Sequence[Gpu], named: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by (the beginning of) their UUID."""
    if named is None:
        return list(gpus)
    words = [word.strip() for word in named.split(",") if word.strip()]
    return [
        gpu
        for gpu in gpus
        if any(word == str(gpu.index) or gpu.uuid.startswith(word) for word in words)
    ]


def _faults(gpu: ElementTree.Element) -> list[str]:
    """What is wrong. Fields that a driver or a GPU does not have are absent or N/A."""
    found = []
    # Since the driver was loaded; older drivers call what cannot be corrected double-bit errors.
    counts = {one.tag: one.text for one in gpu.findall("ecc_errors/volatile/*")}
    counts["double_bit"] = gpu.findtext("ecc_errors/volatile/double_bit/total")
    for name, count in counts.items():
        number = (count or "").strip()
        if ("uncorrectable" in name or name == "double_bit") and number.isdecimal() and int(number):
            found.append(f"{number} memory errors that ECC could not correct ({name})")
    for place, what in _FLAGS.items():
        if gpu.findtext(place, "").strip() == "Yes":
            found.append(what)
    action = gpu.findtext("gpu_recovery_action", "").strip()
    if action not in ("", "None", "N/A"):
        found.append(f"the driver asks for its recovery: {action}")
    return found


_FLAGS = {
    "remapped_rows/remapped_row_pending": "memory rows wait for a reset to be remapped",
    "remapped_rows/remapped_row_failure": "memory rows could not be remapped",
    "retired_pages/pending_retirement": "memory pages wait for a reset to be retired",
    "retired_pages/pending_blacklist": "memory pages wait for a reset to be retired",
    "ecc_errors/aggregate/sram_threshold_exceeded": "more errors of its SRAM than it may have",
}
