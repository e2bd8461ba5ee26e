"""What a job leaves in the run's folder: jobs/<job id>.jsonl, a line as it starts, one as it ends.

    {"kind": "start", "time", "job", "restart", "nodes", "spares", "processes", "host", "hosts",
     "module", "run", "image", "requeues", "restarts"}
    {"kind": "end", "time", "job", "restart", "code", "meaning"}
time is in seconds of the epoch by node 0's clock, nodes are those that train and spares those that
wait beside them, processes are those of a node, host is node 0's name, and hosts are all names as
far as they are known. run is the folder that the run is saved to.
image is what is known of it: its file, target, commit and when it was created. requeues is the
launcher's REQUEUES, null where it is not known here; restarts are those in place that are allowed,
RESTARTS. Between the two are lines of failures and what they cost (training.job.restart.ledger).

Node 0 writes these, to $CHECKPOINTS and to the folder that the run is saved to where that is
another one. A start without an end was killed, or its node was lost. `sqshforge status` reads the
files.
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
    """Note that this start of the job begins. Never fails: a line of warning tells what could not.

    To be called on every node before its processes are started; node 0 writes.
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
    """Note the exit code of this start on node 0. Never fails, as `begin`."""
    if plan.job.node_rank:
        return
    ended = {"code": code, "meaning": meaning(code)}
    note(plan.job, folders(plan, environment), "end", ended)


def meaning(code: int) -> str:
    """Say in words what an exit code of a job means."""
    if code in MEANING:
        return MEANING[code]
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return MEANING[1]


def folders(plan: Plan, environment: Mapping[str, str]) -> list[Path]:
    """Where the job's file is kept: in $CHECKPOINTS, and in the folder that the run is saved to."""
    return _folders(environment, _run(plan))


def path(folder: Path, job: Job) -> Path:
    """Give the job's file in one of its folders."""
    return folder / FOLDER / f"{job.id}.jsonl"


def note(job: Job, folders: list[Path], kind: str, more: dict[str, Any]) -> None:
    """Append a line to the job's file in each of its folders. Never fails, as `begin`."""
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
    """Add a line by one write; after one that a full disk cut off it begins anew."""
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
    """Where a job's file is kept, each folder once."""
    named = environment.get("CHECKPOINTS")
    found = [Path(named).absolute() if named else None, run]
    return list(dict.fromkeys(folder for folder in found if folder is not None))


def _run(plan: Plan) -> Path | None:
    """The folder that the run is saved to; None where the entry point does not tell, or refuses."""
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
    """The folder of a run of Composer; its name may have the number of parameters in it."""
    folder: str = config.trainer.save_folder
    if "{run_name}" not in folder:
        return Path(folder)
    from training import models

    return Path(config.folder(config.run_name(models.parameters(config.model.sizes))))


def _hosts(environment: Mapping[str, str]) -> list[str]:
    """The names of the nodes: as the launcher lists them, else as Slurm writes them in one word."""
    listed = environment.get("NODES") or environment.get("SLURM_JOB_NODELIST") or ""
    return listed.split() or [socket.gethostname()]


def describe_image(environment: Mapping[str, str], provenance: Path = PROVENANCE) -> dict[str, str]:
    """Tell what is known of the image that this process runs in; empty where it is none of ours.

    The file that it was started from, and what it says of itself: target, commit, created.
    """
    found = {"file": environment["IMAGE"]} if environment.get("IMAGE") else {}
    try:
        known = json.loads(provenance.read_text())
        found |= {name: str(known[name]) for name in ("target", "commit", "created") if known[name]}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no image of ours, or none at all
    return found
