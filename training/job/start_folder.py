"""Messages between a launcher and the nodes of one start of its job, in a folder they share.

The launcher makes CHECKPOINTS/.job-JOB.RESTARTS before the nodes start, and removes it at the end.
It contains:

started.N  made by node N before anything else: its container has started
stop       empty until the launcher is asked to stop; node 0 then signals its ranks
lost.NAME  made by node 0 if the job outlives its nodes: that node is lost, and the launcher
           takes it out of the job before Slurm ends the job because of it
ended.N    the exit code of node N. The job's is that of node 0 if the job outlives its nodes;
           otherwise a 2 or 3 of any node, as a person has to fix that, else srun's highest code

Without such a folder (another launcher, a shell) nothing is exchanged, and nothing fails.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from training.job.node import Job

SECONDS = 1.0
"""How often node 0 looks for a request to stop."""


def find(job: Job, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of this start; None if its launcher made none."""
    named = environment.get("CHECKPOINTS")
    folder = Path(named, f".job-{job.run_id}") if named else None
    return folder if folder and folder.is_dir() else None


def sign(folder: Path, job: Job) -> None:
    """Tell the launcher that this node's container has started."""
    with contextlib.suppress(OSError):
        (folder / f"started.{job.node_rank}").touch()


def lose(folder: Path, host: str) -> None:
    """Tell the launcher that a node is lost."""
    with contextlib.suppress(OSError):
        (folder / f"lost.{host}").touch()


def end(folder: Path, job: Job, code: int) -> None:
    """Tell the launcher this node's exit code; the file appears whole or not at all."""
    staging = folder / f".ended.{job.node_rank}"
    with contextlib.suppress(OSError):
        staging.write_text(f"{code}\n")
        staging.replace(folder / f"ended.{job.node_rank}")


def watch(folder: Path, stop: Callable[[], None]) -> None:
    """Call `stop` once the launcher asks to stop, in a thread that ends with this process."""
    threading.Thread(target=_watch, args=(folder, stop), name="stop", daemon=True).start()


def _watch(folder: Path, stop: Callable[[], None]) -> None:
    while not is_asked(folder):
        time.sleep(SECONDS)
    stop()


def is_asked(folder: Path) -> bool:
    """Tell whether the launcher asks to stop."""
    request = folder / "stop"
    # Reading the file asks a network file system's server; a look at its name alone may not.
    with contextlib.suppress(OSError):
        return request.stat().st_size > 0 or bool(request.read_bytes())
    return False
