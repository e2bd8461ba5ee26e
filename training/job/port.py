"""Who has a port of this node."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from training.errors import TrainingError
from training.job.files import content

PROC = Path("/proc")


def require(port: int) -> None:
    """Raise TrainingError if somebody else listens at a port, and say who as far as it shows."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        # As the rendezvous does: at all addresses.
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise TrainingError(
                f"MASTER_PORT: {port} cannot be opened on node 0: {error.strerror}", local=True
            ) from error
        raise TrainingError(
            f"MASTER_PORT: {port} of node 0 is taken by {holder(port)}; end that, or name another "
            "port (MASTER_PORT), the same for all nodes",
            local=True,
        ) from error


def holder(port: int) -> str:
    """Say in words who has a port: the process, else the user that /proc/net shows."""
    users = {}
    for table in ("tcp", "tcp6"):
        for line in content(PROC / "net" / table).splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                users[fields[9]] = fields[7]
    for folder in PROC.iterdir() if users else ():
        if folder.name.isdigit() and _sockets(folder) & {f"socket:[{one}]" for one in users}:
            words = content(folder / "cmdline").replace("\0", " ").strip()
            return f"process {folder.name} ({words})"
    if users:
        return f"a process of user {sorted(users.values())[0]}"
    return "a process that /proc/net does not show"


def _sockets(process: Path) -> set[str]:
    """What a process has open; empty for one of another user, or one that ends meanwhile."""
    found = set()
    with contextlib.suppress(OSError):
        for one in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(one.readlink()))
    return found
