"""The machine that the doctor examines, and its findings."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.project import Project, user_name

OWN_HOME = "export HOME=DIR, a folder that this user may write to"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine as one of its users sees it; `root` is where its /etc, /proc and /dev are."""

    project: Project
    programs: Programs = field(default_factory=Programs)
    engine: str = ""  # the engine that was asked for; "" for any
    root: Path = Path("/")
    uid: int = field(default_factory=os.geteuid)
    user: str = field(default_factory=user_name)

    def setting(self, name: str) -> int | None:
        """Read a number from /proc, such as sys/user/max_user_namespaces; None if there is none."""
        try:
            return int((self.root / "proc" / name).read_text())
        except (OSError, ValueError):
            return None

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file of this machine; none if it cannot be read."""
        try:
            return (self.root / name).read_text().splitlines()
        except OSError:
            return []

    def install(self, *programs: str) -> str:
        return suggest.install(self.programs.which, *programs)


@dataclass(frozen=True)
class Finding:
    """The result of one check. If it is `needed` and not `ok`, the doctor's exit code is 3."""

    what: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True

    def lines(self) -> list[str]:
        """Return it as text: a line, and a second one with the fix if it is not ok."""
        mark = "ok" if self.ok else "MISSING" if self.needed else "-"
        shown = [f"{mark:8}{self.what}: {self.detail}"]
        if not self.ok:
            shown.append(f"{'':8}  {'fix' if self.needed else 'if wanted'}: {self.fix}")
        return shown


def tool(host: Host, name: str, use: str, *, needed: bool = True) -> Finding:
    """Check for a program; `use` says what it is for."""
    path = host.programs.which(name)
    detail = str(path or "not found")
    return Finding(f"{name} ({use})", path is not None, detail, host.install(name), needed)


def version(text: str) -> tuple[int, ...]:
    """Return a version's first two numbers, to compare; fewer where there are fewer."""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", text)[:2])
