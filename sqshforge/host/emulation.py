"""Programs of another platform on this machine: whether the kernel passes them to an emulator."""

from __future__ import annotations

import os

from sqshforge import platforms
from sqshforge.errors import MissingError
from sqshforge.host import suggest, temporary
from sqshforge.host.programs import Programs
from sqshforge.platforms import Platform


def require(platform: Platform | None, programs: Programs) -> None:
    """Raise `MissingError` if this machine cannot run programs of a platform (None: its own)."""
    if platform is None or runs(platform, programs):
        return
    raise MissingError(
        f"this machine cannot run programs of {platform.name}, as a build for it does",
        where=f"this machine is {platforms.own()}",
        fix=f"build on such a machine; or {suggest.install(programs.which, 'qemu-user-static')}, "
        "by which this one emulates it, many times slower",
    )


def runs(platform: Platform, programs: Programs) -> bool:
    """Whether programs of a platform run here, also in the root of an image.

    The smallest program is tried, because there is more than one way to set up an emulator.
    """
    if platform.is_own:
        return True
    with temporary.folder("emulation", mode=0o755) as root:
        program = root / "program"
        program.write_bytes(platform.smallest_program())
        program.chmod(0o755)
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        tried = programs.attempt(["unshare", *user, "--root", root, "/program"])
    return tried.code == 0
