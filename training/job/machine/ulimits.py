"""The limits of a process (ulimit), and raising them before a node's processes start."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

from training.job.types import Decision

INFINITE = resource.RLIM_INFINITY
KINDS = {
    "memlock": resource.RLIMIT_MEMLOCK,  # bytes
    "nofile": resource.RLIMIT_NOFILE,  # files
    "stack": resource.RLIMIT_STACK,  # bytes
}


@dataclass(frozen=True)
class Limit:
    """A limit: the soft value counts, and a process may raise it to the hard one."""

    name: str
    soft: int
    hard: int


def current_limits() -> tuple[Limit, ...]:
    """Look up the limits of this process."""
    return tuple(Limit(name, *resource.getrlimit(kind)) for name, kind in KINDS.items())


def limits_to_raise(limits: tuple[Limit, ...], efa: bool) -> tuple[Limit, ...]:
    """Choose the limits to raise to their hard values; memlock only for EFA, which locks memory."""
    return tuple(one for one in limits if one.soft != one.hard and (one.name != "memlock" or efa))


def describe_limits(limits: tuple[Limit, ...], efa: bool) -> list[Decision]:
    """Describe the limits as they will be once raised."""
    raised = [one.name for one in limits_to_raise(limits, efa)]
    shown = [one for one in limits if one.name != "memlock" or efa]
    values = ", ".join(f"{one.name} {_text(one)}" for one in shown)
    why = f"; {', '.join(raised)} raised" if raised else ""
    return [Decision("limits", "as high as allowed", f"{values}{why}")] if shown else []


def limit_warnings(limits: tuple[Limit, ...], efa: bool) -> list[str]:
    """Warn of a limit on locked memory if the network cards need it."""
    return [
        f"memlock: {_text(one)} can be locked in memory, but EFA needs `unlimited`; fix: set "
        "LimitMEMLOCK=infinity for slurmd (systemd), PropagateResourceLimitsExcept=MEMLOCK in "
        "slurm.conf"
        for one in limits
        if efa and one.name == "memlock" and one.hard != INFINITE
    ]


def raise_limits(limits: tuple[Limit, ...]) -> None:
    """Raise limits of this process to their hard values; its children inherit them."""
    for one in limits:
        with contextlib.suppress(ValueError, OSError):  # a hard limit that the kernel refuses
            resource.setrlimit(KINDS[one.name], (one.hard, one.hard))


def _text(limit: Limit) -> str:
    """Format the hard value of a limit."""
    if limit.hard == INFINITE:
        return "unlimited"
    return str(limit.hard) if limit.name == "nofile" else f"{limit.hard // 2**10} KiB"
