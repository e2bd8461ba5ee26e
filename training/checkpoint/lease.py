"""One run to a folder: two at once would destroy each other's checkpoints.

SAVE/.running says who runs there, and has a counter that is renewed every few seconds. It needs no
file locks, which do nothing on some shared file systems, and no clocks, which differ between hosts:
a process that finds a lease watches its counter for longer than a renewal takes. If the counter
stands still, the run there is dead, and the next one takes the folder over.

Of many that try to, only one may win. The right to follow a lease is a file named after it,
.running.<its id>, that only one process can make (O_EXCL). So leases form a chain, the last of
which counts; whoever has made it renames it to .running. Light: no torch here.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from training.errors import RequestError, TrainingError

LEASE_FILE = ".running"
ROUND = "RESTART_ROUND"
"""Set for ranks that may restart on other nodes: how often this start's ranks were started."""
_COUNT = 20  # digits of the counter, so that it can be overwritten in place
LEASE_THREAD = "lease"
"""The name of the thread that renews the lease."""
BEAT = 4.0
"""Seconds between two renewals."""
SILENCE = 20.0
"""Seconds without a renewal after which a run counts as dead."""
_POLL = 0.2
_MOST = 1.0
"""The most seconds that one look counts for: a disk that hung could show no renewals."""
_SAID = 1.0


@dataclass(frozen=True, kw_only=True)
class LeaseOwner:
    """One start of a run, as it is written in a lease."""

    id: str  # no other start has it
    job: str  # Slurm's; empty outside of it
    restart: int  # of that job
    host: str
    pid: int
    boot: str  # of the host's kernel; empty if it cannot be known
    namespace: str  # in which pid counts; empty if it cannot be known
    since: str  # by the clock of its host, for people
    round: int = 0  # of that start; not written if there is only one

    @classmethod
    def here(cls) -> LeaseOwner:
        """Describe this process."""
        restart, round = os.environ.get("SLURM_RESTART_COUNT", ""), os.environ.get(ROUND, "")
        boot = namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            # The /proc of another namespace has other numbers.
            if Path("/proc/self").readlink().name == str(os.getpid()):
                namespace = str(Path("/proc/self/ns/pid").readlink())
        return cls(
            id=uuid4().hex,
            job=os.environ.get("SLURM_JOB_ID", ""),
            restart=int(restart) if restart.isdecimal() else 0,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=boot,
            namespace=namespace,
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            round=int(round) if round.isdecimal() else 0,
        )

    @classmethod
    def of(cls, line: str) -> LeaseOwner | None:
        """Parse what the property `line` gives; None if it is torn."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None

    @property
    def line(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if k != "round" or v})

    def described(self) -> str:
        what = f"job {self.job} (restart {self.restart})" if self.job else "a run"
        return f"{what}, process {self.pid} on {self.host} since {self.since}"

    def how_to_end(self) -> str:
        return f"scancel {self.job}" if self.job else f"kill {self.pid} on {self.host}"

    def has_died(self, me: LeaseOwner) -> bool:
        """Tell whether its process is seen to be gone; False if it cannot be seen from here."""
        same = (self.boot, self.namespace) == (me.boot, me.namespace)
        return same and all((me.boot, me.namespace)) and not _lives(self.pid)

    def was_restarted_as(self, me: LeaseOwner) -> bool:
        """Tell whether Slurm has ended it, and restarted its job as this process."""
        return bool(me.job) and self.job == me.job and self.restart < me.restart

    def was_replaced_by(self, me: LeaseOwner) -> bool:
        """Tell whether its node is lost, and another one took its place in the same start."""
        same = bool(me.job) and (self.job, self.restart) == (me.job, me.restart)
        return same and self.round < me.round


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"  # ended, and not yet collected by its parent
    except (ProcessLookupError, FileNotFoundError):
        return False
    except OSError:  # another user's
        return True


@dataclass(frozen=True)
class FoundLease:
    """A lease as it was read; holder is None if a kill cut off the writing."""

    path: Path
    holder: LeaseOwner | None
    text: str  # all of it, which differs once it has been renewed

    @property
    def next(self) -> Path:
        """The path of the lease that follows this one."""
        if self.holder is None:
            return self.path.with_name(f"{self.path.name}.torn")
        return self.path.with_name(f"{LEASE_FILE}.{self.holder.id}")


def read_chain(folder: Path) -> list[FoundLease]:
    """Read the leases of a folder, of which the last counts. Raises OSError."""
    found: list[FoundLease] = []
    path = folder / LEASE_FILE
    while (text := _read(path)) is not None:
        found.append(FoundLease(path, LeaseOwner.of(text.partition("\n")[0]), text))
        path = found[-1].next
    return found


def make_lease(path: Path, holder: LeaseOwner) -> int:
    """Make a lease's file, which must not exist, and return its descriptor. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    text = f"{holder.line}\n{0:0{_COUNT}}\n".encode()
    try:
        if os.write(file, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink()
        raise
    return file


def renew_lease(file: int, holder: LeaseOwner, count: int) -> None:
    """Overwrite the counter in place: needs no room, and cannot undo that a file was replaced."""
    os.pwrite(file, f"{count:0{_COUNT}}\n".encode(), len(holder.line.encode()) + 1)
    os.fsync(file)  # else other hosts would not see it


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        # On a shared disk, a file that is replaced while it is read is stale, not missing.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


class RunLease:
    """A folder that needs no lease of this process, because rank 0's process does."""

    lost = ""
    """Why the folder is no longer this run's; empty as long as it is."""

    def take(self, tell: Callable[[str], None]) -> None:
        """Take the lease of the folder, which is made if it does not exist."""

    def check(self) -> None:
        """Look at the lease now. Raises TrainingError if it is lost."""

    def release(self) -> None:
        """Release the lease, if it was taken. May be called again, and from any thread."""

    def __enter__(self) -> RunLease:
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()


NO_LEASE = RunLease()


class OwnLease(RunLease):
    """A lease of this process on a folder; a thread renews it and checks that it holds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._holder, self._file = folder, LeaseOwner.here(), -1
        self._over = threading.Event()
        self._last = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=LEASE_THREAD, daemon=True)

    def take(self, tell: Callable[[str], None]) -> None:
        """Take the lease of the folder.

        At once if nobody has it, or only a dead process of this host. Otherwise the lease is
        watched: it takes up to SILENCE to find that the run there is dead, which is reported. Of
        many that try at once, one succeeds. Raises RequestError naming the run that lives there, or
        if the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while (file := _try(self._folder, self._holder, tell)) is None:
                time.sleep(_POLL)
        except OSError as error:
            raise RequestError(
                f"save_ckpt_path: {self._folder} cannot be written: {error.strerror}"
            ) from error
        self._file = file
        self._thread.start()

    def check(self) -> None:
        self._look()
        if self.lost:
            raise TrainingError(self.lost)

    def release(self) -> None:
        with self._last:
            if self._over.is_set() or self._file < 0:
                return
            self._over.set()
        self._thread.join(BEAT)  # a disk that hangs is not waited for
        with suppress(OSError):
            found = read_chain(self._folder)
            os.close(self._file)
            if found and found[0].holder == self._holder:
                found[0].path.unlink()

    def _run(self) -> None:
        count = 0
        while not self._over.wait(BEAT) and not self.lost:
            count += 1
            with suppress(OSError):  # the disk is full or away: tried again later
                renew_lease(self._file, self._holder, count)
            self._look()

    def _look(self) -> None:
        try:
            found = read_chain(self._folder)
        except OSError:
            return  # nothing is known, and nothing can be written there either
        if [one.holder for one in found] == [self._holder]:
            return
        other = found[-1].holder if found else None
        what = f"was taken over by {other.described()}" if other else f"has lost its {LEASE_FILE}"
        self.lost = (
            f"{self._folder} {what}; this run ends before it writes another checkpoint; fix: let "
            "one run at a time use a folder"
        )


def _try(folder: Path, me: LeaseOwner, tell: Callable[[str], None]) -> int | None:
    """Try once; return the lease's file, or None if another process was at work meanwhile."""
    found = read_chain(folder)
    path = folder / LEASE_FILE
    if found:
        why = _outlive(folder, found[-1], me, tell)
        if not why:
            return None
        path = found[-1].next
    try:
        file = make_lease(path, me)
    except FileExistsError:
        return None
    if found:
        if not _put_in_place(folder, path, me):
            os.close(file)
            path.unlink(missing_ok=True)
            return None
        last = found[-1].holder
        who = last.described() if last else "a run that was killed as it began"
        tell(f"{folder}: taken over from {who}: {why}")
    return file


def _put_in_place(folder: Path, path: Path, me: LeaseOwner) -> bool:
    """Make this process's lease the only one, if it is the last; return whether it was."""
    now = read_chain(folder)
    if not now or now[-1].holder != me:  # the one that it follows was released meanwhile
        return False
    try:
        path.replace(folder / LEASE_FILE)
    except FileNotFoundError:  # it was followed itself, as after this process was suspended
        return False
    for one in now[1:-1]:
        one.path.unlink(missing_ok=True)
    return True


def _outlive(folder: Path, found: FoundLease, me: LeaseOwner, tell: Callable[[str], None]) -> str:
    """Watch a lease until its run is known to be dead, and say why; empty if another one counts.

    Raises RequestError if the run lives, unless it is an earlier start of this very job, which ends
    once it is followed.
    """
    text, silent, taken, before, said = found.text, 0.0, 0.0, time.monotonic(), False
    holder = found.holder
    while True:
        if holder and holder.has_died(me):
            return "that process is dead"
        if holder and holder.was_replaced_by(me):
            return "the job goes on without the node of that process"
        if silent > SILENCE:
            return f"it has given no sign of life for {SILENCE:.0f} s"
        if holder and holder.was_restarted_as(me) and taken > SILENCE:
            return "Slurm has started that job again, as this one"
        if taken > _SAID and not said:
            said = True
            who = holder.described() if holder else "an unknown run"
            tell(f"{folder} is leased by {who}: checking for up to {SILENCE:.0f} s if it lives")
        time.sleep(_POLL)
        now, last = time.monotonic(), read_chain(folder)
        passed, before = min(now - before, _MOST), now
        if not last or last[-1].path != found.path or last[-1].holder != holder:
            return ""
        silent, taken = silent + passed, taken + passed
        if last[-1].text == text:
            continue
        if holder and not holder.was_restarted_as(me):
            raise RequestError(
                f"save_ckpt_path: {folder} is in use by {holder.described()}; two runs there would "
                f"destroy each other's checkpoints; fix: wait for it, end it "
                f"({holder.how_to_end()}), or give another folder"
            )
        text, silent = last[-1].text, 0.0
