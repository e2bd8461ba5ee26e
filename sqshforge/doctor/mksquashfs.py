"""Check whether mksquashfs is fit for packing."""

from __future__ import annotations

import re

from sqshforge.doctor.finding import Finding, Host, tool

# According to its release notes, it may corrupt sparse files since 4.7.
CORRUPTS_SINCE = (4, 7, 0)
MENDED_IN = (4, 7, 5)
FIX = "install squashfs-tools 4.7.5 or later, or one before 4.7"


def finding(host: Host) -> Finding:
    """Check whether mksquashfs is installed and fit."""
    found = tool(host, "mksquashfs", "packing")
    path = host.programs.which("mksquashfs")
    said = host.programs.attempt([path, "-version"], timeout=20).out if path else ""
    wrong = fault(said)
    return Finding(found.what, False, f"{path}: {wrong}", FIX) if wrong else found


def fault(said: str) -> str:
    """Return what is wrong with the version in the program's output; empty if nothing is."""
    found = re.search(r"version (\d+)\.(\d+)(?:\.(\d+))?", said)
    if found is None:
        return ""
    number = tuple(int(part or 0) for part in found.groups())
    if not CORRUPTS_SINCE <= number < MENDED_IN:
        return ""
    return f"mksquashfs {found[0].split()[1]} may corrupt what it packs where files are sparse"
