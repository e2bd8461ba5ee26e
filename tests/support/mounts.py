"""Mounts of a test's own, which root and ordinary users can make."""

from __future__ import annotations

import os


def mounting() -> tuple[str, ...]:
    """Words that start a program which may mount, in a mount namespace of its own.

    For an ordinary user it is also in a user namespace, with all files of the user's being root's.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", *user, "--mount")


def entering(pid: int) -> tuple[str, ...]:
    """Words that start a program in the namespaces of a process that `mounting` started."""
    user = () if os.geteuid() == 0 else (f"--user=/proc/{pid}/ns/user", "--preserve-credentials")
    return ("nsenter", *user, f"--mount=/proc/{pid}/ns/mnt")
