"""What checks saw and what is wrong, and how to run a check that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, TypeVar

TIMEOUT = 30
"""Seconds for one of a node's own checks, except the driver's: a file system may never answer."""

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What one check saw on one node."""

    check: str
    seconds: float
    summary: str  # what there is, given for a healthy node too
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """What is wrong, and the node on which it is wrong; None if that is not known."""

    check: str
    rank: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a node reports of itself to node 0."""

    rank: int
    name: str  # Slurm's; empty if not known
    findings: tuple[Finding, ...]
    versions: Mapping[str, str]
    backend: str  # of torch.distributed; empty if its processes cannot compute together
    processes: int  # processes that take part when all nodes compute together
    wrote: bool  # whether it wrote its file in the shared folder

    def pack(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Report:
        """Unpack a report. Raises KeyError or TypeError if another version of this made it."""
        findings = tuple(
            Finding(**{**one, "faults": tuple(one["faults"])}) for one in packed["findings"]
        )
        return cls(**{**packed, "findings": findings})


def run_check(
    name: str, work: Callable[[], tuple[str, list[str]]], seconds: float = TIMEOUT
) -> Finding:
    """Run one check, which returns a summary and faults; a timeout or OSError is a fault too."""
    began = monotonic()
    try:
        summary, faults = call_with_timeout(seconds, work)
    except TimeoutError:
        summary, faults = "", [f"no answer within {seconds:.0f} s"]
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        summary, faults = "", [f"{place}{error.strerror or error}"]
    return Finding(name, monotonic() - began, summary, tuple(faults))


def call_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns or raise what it raises; TimeoutError if it takes longer.

    Work that hangs is left behind in a thread that does not keep the process from ending.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
