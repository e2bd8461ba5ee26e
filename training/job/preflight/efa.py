"""EFA: the cards that the kernel has, the container's way to them, and libfabric's provider."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

AMAZON = "0x1d0f"  # PCI vendor
TOOLS = "/opt/amazon/efa/bin"
PATIENCE = 25
"""Seconds for fi_info."""


def cards(root: Path) -> list[str]:
    """The names of the EFA devices, which libfabric's domains have too."""
    found = []
    for one in sorted((root / "sys/class/infiniband").glob("*")):
        vendor = one / "device/vendor"
        if vendor.is_file() and vendor.read_text().strip() == AMAZON:
            found.append(one.name)
    return found


def look(root: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Say whether every card can be used. Raises OSError if fi_info cannot be started."""
    found = cards(root)
    if not found:
        return "no EFA here", []
    faults = []
    for card in found:
        state = root / "sys/class/infiniband" / card / "ports/1/state"
        if state.is_file() and "ACTIVE" not in state.read_text():
            faults.append(f"the port of {card} is not active: {state.read_text().strip()}")
        for verbs in sorted((root / "sys/class/infiniband" / card / "device").glob("*/uverbs*")):
            if not (root / "dev/infiniband" / verbs.name).exists():
                faults.append(f"{card}: there is no /dev/infiniband/{verbs.name} in the container")
    program = program_of(environment)
    if program is None:
        return f"{len(found)} EFA cards, no fi_info to ask", faults
    try:
        done = subprocess.run(
            [program, "-p", "efa"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return "", [*faults, f"fi_info gives no answer within {PATIENCE} s"]
    if done.returncode:
        said = (done.stderr + done.stdout).strip().split("\n")[0][:200]
        return "", [*faults, f"libfabric's provider does not load: fi_info -p efa: {said}"]
    domains = set(re.findall(r"domain: (\S+?)(?:-rdm|-dgrm)?$", done.stdout, re.MULTILINE))
    missing = [card for card in found if card not in domains]
    if missing:
        faults.append(f"libfabric's provider does not have {', '.join(missing)}")
    return f"{len(found)} EFA cards", faults


def program_of(environment: Mapping[str, str]) -> str | None:
    """Find fi_info on the PATH, or where Amazon's installer puts it."""
    return shutil.which("fi_info", path=f"{environment.get('PATH', '')}:{TOOLS}")


def libfabric(environment: Mapping[str, str]) -> str:
    """The version of libfabric; empty if there is no fi_info, or it does not say."""
    program = program_of(environment)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--version"], env=environment, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"^libfabric: (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""
