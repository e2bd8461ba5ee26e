"""What connects the nodes: EFA cards, and the folder that all of them must see."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from training.job.plan import Job

AMAZON = "0x1d0f"  # PCI vendor
EFA_TOOLS = "/opt/amazon/efa/bin"
FI_INFO_TIMEOUT = 25
"""Seconds for fi_info."""

SEEN_WITHIN = 5.0
"""Seconds for a file to be seen by the other nodes after it was written and synced."""


def efa_cards(root: Path) -> list[str]:
    """The names of the EFA devices, which libfabric also gives its domains."""
    found = []
    for one in sorted((root / "sys/class/infiniband").glob("*")):
        vendor = one / "device/vendor"
        if vendor.is_file() and vendor.read_text().strip() == AMAZON:
            found.append(one.name)
    return found


def check_efa(root: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Check that every card can be used. Raises OSError if fi_info cannot be started."""
    found = efa_cards(root)
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
    program = find_fi_info(environment)
    if program is None:
        return f"{len(found)} EFA cards, no fi_info to ask", faults
    try:
        done = subprocess.run(
            [program, "-p", "efa"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=FI_INFO_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "", [*faults, f"fi_info gives no answer within {FI_INFO_TIMEOUT} s"]
    if done.returncode:
        said = (done.stderr + done.stdout).strip().split("\n")[0][:200]
        return "", [*faults, f"libfabric's provider does not load: fi_info -p efa: {said}"]
    domains = set(re.findall(r"domain: (\S+?)(?:-rdm|-dgrm)?$", done.stdout, re.MULTILINE))
    missing = [card for card in found if card not in domains]
    if missing:
        faults.append(f"libfabric's provider does not have {', '.join(missing)}")
    return f"{len(found)} EFA cards", faults


def find_fi_info(environment: Mapping[str, str]) -> str | None:
    """Find fi_info on the PATH, or where Amazon's installer puts it."""
    return shutil.which("fi_info", path=f"{environment.get('PATH', '')}:{EFA_TOOLS}")


def libfabric_version(environment: Mapping[str, str]) -> str:
    """The version of libfabric; empty if there is no fi_info or it does not tell."""
    program = find_fi_info(environment)
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


class SharedFolder:
    """One node's view of the shared folder."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self._job = folder, job
        self._place = folder / f".preflight.{job.run_id}"

    def write(self, nonce: str) -> tuple[str, list[str]]:
        """Write this node's file. Raises OSError.

        `nonce` is this run's alone, so that files of an earlier preflight do not count.
        """
        self._place.mkdir(exist_ok=True)
        with self._file(self._job.node_rank).open("w") as file:
            file.write(self._text(nonce, self._job.node_rank))
            file.flush()
            os.fsync(file.fileno())
        return str(self.folder), []

    def unseen(self, nonce: str, ranks: Iterable[int]) -> list[int]:
        """Read other nodes' files; return the nodes whose file is missing or wrong at the end.

        The wait is `SEEN_WITHIN`. Files are opened by name, as NFS may show an old listing for a
        minute.
        """
        left = list(ranks)
        until = time.monotonic() + SEEN_WITHIN
        while True:
            left = [rank for rank in left if not self._right(nonce, rank)]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.2)

    def has_come(self, rank: int) -> bool:
        """Tell whether a node of this start has written its file, and has not yet finished."""
        return self._file(rank).exists()

    def remove(self) -> None:
        """Remove this node's file, and with the last one the folder of all."""
        with contextlib.suppress(OSError):
            self._file(self._job.node_rank).unlink(missing_ok=True)
            self._place.rmdir()

    def remove_earlier(self) -> None:
        """Remove what earlier starts of the job left when they were killed."""
        for place in self.folder.glob(f".preflight.{self._job.id}.*"):
            if place != self._place:
                shutil.rmtree(place, ignore_errors=True)

    def _file(self, rank: int) -> Path:
        return self._place / str(rank)

    def _text(self, nonce: str, rank: int) -> str:
        return f"{self._job.run_id} {rank} {nonce}\n"

    def _right(self, nonce: str, rank: int) -> bool:
        try:
            return self._file(rank).read_text() == self._text(nonce, rank)
        except (OSError, UnicodeDecodeError):
            return False


class BadNodes:
    """The file that tells the launcher which nodes to leave out next time."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.path = folder / f"bad-nodes.{job.run_id}"
        self._found = self._stamp()

    def write(self, hosts: Iterable[str]) -> None:
        """Write the hosts, a line each, in one step; remove the file if there are none.

        What an earlier start of the job wrote does not apply to this one. Raises OSError.
        """
        lines = "".join(f"{host}\n" for host in hosts)
        if not lines:
            self.path.unlink(missing_ok=True)
            return
        staging = self.path.with_name(f"{self.path.name}.{os.urandom(4).hex()}")
        try:
            with staging.open("w") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(self.path)
        finally:
            staging.unlink(missing_ok=True)

    def is_news(self) -> bool:
        """Tell whether another node has written the file since this one began."""
        return self._stamp() not in (None, self._found)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
