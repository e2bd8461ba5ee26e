"""What Neuron's driver and its neuron-ls say of the Trainium chips."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

TOOLS = "/opt/aws/neuron/bin"
PATIENCE = 20
"""Seconds for neuron-ls."""


def chips(root: Path) -> int:
    """Count the chips by their device files."""
    return sum(1 for one in (root / "dev").iterdir() if re.fullmatch(r"neuron\d+", one.name))


def look(root: Path, environment: Mapping[str, str], processes: int) -> tuple[str, list[str]]:
    """Compare what there is with what neuron-ls sees, and read the counts of memory errors.

    Raises OSError if neuron-ls cannot be started.
    """
    count = chips(root)
    faults = _errors(root)
    program = shutil.which("neuron-ls", path=f"{environment.get('PATH', '')}:{TOOLS}")
    if program is None:
        return f"{count} Neuron chips, no neuron-ls to ask", faults
    try:
        done = subprocess.run(
            [program, "--json-output"], env=environment, capture_output=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return "", [*faults, f"neuron-ls gives no answer within {PATIENCE} s"]
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


def _errors(root: Path) -> list[str]:
    """Memory errors since the driver was loaded. Drivers keep the counts in different folders."""
    found = []
    for chip in sorted((root / "sys/devices/virtual/neuron_device").glob("neuron*")):
        for name in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
            for place in (*chip.rglob(f"{name}/total"), *chip.rglob(name)):
                text = place.read_text().strip() if place.is_file() else ""
                if text.isdecimal() and int(text):
                    found.append(f"{chip.name}: {text} memory errors not corrected ({name})")
    return found
