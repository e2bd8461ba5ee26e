"""Versions of Debian packages, asked of the archives that this machine has for a suite."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sqshforge.host.network import apt_sources
from sqshforge.host.programs import Programs
from sqshforge.lock.model import LockedApt


def resolve(suite: str, packages: Sequence[str], programs: Programs) -> LockedApt | None:
    """Packages and all that they need, as the suite has them; None where it is not at hand.

    apt works in folders of its own here: neither root's rights nor this machine's state are used.
    """
    sources = apt_sources(suite, programs)
    if not sources or not packages:
        return None
    with tempfile.TemporaryDirectory(prefix="sqshforge-apt-") as name:
        folder = Path(name)
        for place in ("state/lists/partial", "cache/archives/partial", "parts"):
            (folder / place).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text("".join(f"{line}\n" for line in sources))
        settings = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": folder / "parts",
            "APT::Architecture": "amd64",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "",
        }
        argv = ["apt-get", "-qq", *(w for k, v in settings.items() for w in ("-o", f"{k}={v}"))]
        if programs.attempt([*argv, "update"]).code != 0:
            return None
        listing = programs.attempt([*argv, "--simulate", "install", *packages])
    if listing.code != 0:
        return None
    found = re.findall(r"^Inst (\S+) \((\S+) ", listing.out, re.MULTILINE)
    return LockedApt(suite=suite, packages=tuple(sorted(found)))
