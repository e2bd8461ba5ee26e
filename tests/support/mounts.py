"""Mounts for a single test, which root and ordinary users can make."""

from __future__ import annotations

import os


def mounting() -> tuple[str, ...]:
    """Return words that start a program which may mount, in a mount namespace of its own.

    For an ordinary user, it is also in a user namespace where the user's files belong to root.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", *user, "--mount")


def entering(pid: int) -> tuple[str, ...]:
    """Return words that start a program in the namespaces of one that `mounting` started."""
    user = () if os.geteuid() == 0 else (f"--user=/proc/{pid}/ns/user", "--preserve-credentials")
    return ("nsenter", *user, f"--mount=/proc/{pid}/ns/mnt")
