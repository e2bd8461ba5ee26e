"""Who holds a claim: told to people, and known to be dead where that can be seen."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One start of a run, as it is written into a claim."""

    id: str  # no other start has it
    job: str  # Slurm's; empty outside of it
    restart: int  # of that job
    host: str
    pid: int
    boot: str  # of the host's kernel; empty where it cannot be known
    namespace: str  # in which pid counts; empty where it cannot be known
    since: str  # by the clock of its host, for people

    @classmethod
    def here(cls) -> Holder:
        """Describe this process."""
        restart = os.environ.get("SLURM_RESTART_COUNT", "")
        boot = namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            # A /proc of another namespace than this process's own has other numbers.
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
        )

    @classmethod
    def of(cls, line: str) -> Holder | None:
        """Read what `line` wrote; None if it is torn."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None

    @property
    def line(self) -> str:
        return json.dumps(asdict(self))

    def told(self) -> str:
        what = f"job {self.job} (restart {self.restart})" if self.job else "a run"
        return f"{what}, process {self.pid} on {self.host} since {self.since}"

    def how_to_end(self) -> str:
        return f"scancel {self.job}" if self.job else f"kill {self.pid} on {self.host}"

    def has_died(self, me: Holder) -> bool:
        """Tell whether its process is seen to be gone; False where it cannot be seen from here."""
        same = (self.boot, self.namespace) == (me.boot, me.namespace)
        return same and all((me.boot, me.namespace)) and not _lives(self.pid)

    def was_restarted_as(self, me: Holder) -> bool:
        """Tell whether Slurm has ended it, and started its job again as this process."""
        return bool(me.job) and self.job == me.job and self.restart < me.restart


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"  # ended, and not yet fetched by its parent
    except (ProcessLookupError, FileNotFoundError):
        return False
    except OSError:  # another user's
        return True
