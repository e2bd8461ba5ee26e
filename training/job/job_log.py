"""The log of a job in its run's folder, jobs/<job id>.jsonl: a line at each start and each end.

    {"kind": "start", "time", "job", "restart", "nodes", "spares", "processes", "host", "hosts",
     "module", "run", "image", "requeues", "restarts"}
    {"kind": "end", "time", "job", "restart", "code", "meaning"}
time is in seconds since the epoch by node 0's clock. nodes is how many train, spares how many wait
beside them, and processes how many each node has. host is node 0's name, and hosts are all names as
far as they are known. run is the folder that the run is saved to. image is what is known of the
image: its file, target, commit and when it was created. requeues is the launcher's REQUEUES, null
if it is not known here; restarts is how many restarts in place are allowed, RESTARTS. Between the
two are lines about failures and what they cost (training.job.restart.ledger).

Node 0 writes these lines to $CHECKPOINTS, and to the run's folder if that is another one. A start
without an end was killed, or its node was lost. `sqshforge status` reads the files.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import BAD_NODE, HUNG, SAVED, TrainingError
from training.job.plan import Job, Plan

FOLDER = "jobs"
PROVENANCE = Path("/sqshforge/meta/provenance.json")
MEANING = {
    0: "done",
    1: "it failed",
    2: "the request was wrong",
    3: "something is missing on a node",
    SAVED: "saved and stopped, as it was asked to",
    HUNG: "ranks hung, and it was ended",
    BAD_NODE: "a node is bad",
}
"""What the exit codes of a job mean; those above 128 are deaths by a signal."""


def begin(plan: Plan, environment: Mapping[str, str], provenance: Path = PROVENANCE) -> None:
    """Log that this start of the job begins. Never fails: warns if a file cannot be written.

    Call it on every node before its processes start; only node 0 writes.
    """
    if plan.job.node_rank:
        return
    run, requeues = _run(plan), environment.get("REQUEUES", "")
    start = {
        "nodes": plan.job.training,
        "spares": plan.job.spares,
        "processes": plan.processes,
        "host": socket.gethostname(),
        "hosts": _hosts(environment),
        "module": plan.module,
        "run": str(run or environment.get("CHECKPOINTS", "")),
        "image": describe_image(environment, provenance),
        "requeues": int(requeues) if requeues.isdecimal() else None,
        "restarts": plan.restarts,
    }
    note(plan.job, _folders(environment, run), "start", start)


def end(plan: Plan, environment: Mapping[str, str], code: int) -> None:
    """Log the exit code of this start, on node 0. Never fails, like `begin`."""
    if plan.job.node_rank:
        return
    ended = {"code": code, "meaning": meaning(code)}
    note(plan.job, folders(plan, environment), "end", ended)


def meaning(code: int) -> str:
    """Describe in words what a job's exit code means."""
    if code in MEANING:
        return MEANING[code]
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return MEANING[1]


def folders(plan: Plan, environment: Mapping[str, str]) -> list[Path]:
    """The folders of the job's file: $CHECKPOINTS, and the folder that the run is saved to."""
    return _folders(environment, _run(plan))


def path(folder: Path, job: Job) -> Path:
    """The path of the job's file in one of its folders."""
    return folder / FOLDER / f"{job.id}.jsonl"


def note(job: Job, folders: list[Path], kind: str, more: dict[str, Any]) -> None:
    """Append a line to the job's file in each of its folders. Never fails, like `begin`."""
    common = {"kind": kind, "time": round(time.time(), 3), "job": job.id, "restart": job.restarts}
    line = json.dumps({**common, **more}).encode() + b"\n"
    for folder in folders:
        file = path(folder, job)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _append(file, line)
        except OSError as error:
            print(
                f"training.launch: WARNING: {file} cannot be written ({error.strerror}): "
                f"sqshforge status will not know of this job's {kind}",
                file=sys.stderr,
                flush=True,
            )


def _append(path: Path, line: bytes) -> None:
    """Append a line in one write, after a line break if a full disk cut the last one off."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(0, "only a part of the line was written: the disk is full")
    finally:
        os.close(descriptor)


def _folders(environment: Mapping[str, str], run: Path | None) -> list[Path]:
    """The folders of a job's file, each once."""
    named = environment.get("CHECKPOINTS")
    found = [Path(named).absolute() if named else None, run]
    return list(dict.fromkeys(folder for folder in found if folder is not None))


def _run(plan: Plan) -> Path | None:
    """The folder that the run is saved to; None if the entry point does not tell, or refuses."""
    try:
        module = importlib.import_module(plan.module)
        if hasattr(module, "__path__"):  # a package is started by its __main__
            module = importlib.import_module(f"{plan.module}.__main__")
        config = module.configure(plan.flags)
        if hasattr(config, "run"):
            return Path(config.run.save_ckpt_path).absolute()
        return _composer(config).absolute()
    except (ImportError, AttributeError, TrainingError):
        return None


def _composer(config: Any) -> Path:
    """The folder of a Composer run; its name may contain the number of parameters."""
    folder: str = config.trainer.save_folder
    if "{run_name}" not in folder:
        return Path(folder)
    from training import models

    return Path(config.folder(config.run_name(models.parameters(config.model.sizes))))


def _hosts(environment: Mapping[str, str]) -> list[str]:
    """The names of the nodes: the launcher's list, else Slurm's compressed list as one word."""
    listed = environment.get("NODES") or environment.get("SLURM_JOB_NODELIST") or ""
    return listed.split() or [socket.gethostname()]


def describe_image(environment: Mapping[str, str], provenance: Path = PROVENANCE) -> dict[str, str]:
    """Describe the image that this process runs in; empty if nothing is known of it.

    Gives the file that it was started from, and its own target, commit and time of creation.
    """
    found = {"file": environment["IMAGE"]} if environment.get("IMAGE") else {}
    try:
        known = json.loads(provenance.read_text())
        found |= {name: str(known[name]) for name in ("target", "commit", "created") if known[name]}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no image of ours, or none at all
    return found
