"""The part of a job on one node: make the decisions that depend on the node, then start torchrun.

    python3 -m training.launch [--module M] [--nproc N] -- FLAGS...

It runs as one task per node under `srun`, inside the container; without Slurm, it is a job of one
node. Every decision is printed in one block, and a variable of the same name overrides it.
docs/training/nodes.md lists what is decided, and from what.

Exit codes are those of the processes: 0 done, 1 failed, 2 the request was wrong, 85 stopped by
SIGTERM after a checkpoint (start it again), 86 a rank hung, 128 + n killed by signal n; and 87 if
a node is bad, which is found before they start. The first Ctrl-C acts as SIGTERM, the second ends
everything at once with 130.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import cli
from training.checkpoint import memory_folder
from training.checkpoint.memory_folder import MemoryFolder
from training.config.config import Config
from training.config.global_batch import RANKS, why_not_on
from training.errors import INTERRUPTED, RequestError, TrainingError, writing
from training.job import agent, job_log, nsys, preflight, start_folder, triton_cache
from training.job.machine import ulimits
from training.job.node import HERE, look_at_node, require_port
from training.job.plan import Job, Plan, make_plan, read_job
from training.job.replay import node as replay
from training.job.restart.control import RestartControl
from training.job.restart.escalation import Budget
from training.job.restart.ledger import ALONE, Ledger
from training.job.types import GIVEN


def main(arguments: Sequence[str], root: Path = HERE) -> int:
    """Run this node's part; return the exit code. root: where to look for the node's hardware."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python3 -m training.launch",
        description=str(__doc__),
        formatter_class=cli.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--module",
        metavar="NAME",
        default="training.mamba_fsdp",
        help="what torchrun starts (default: training.mamba_fsdp)",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="INT",
        help="processes on this node (default: one per accelerator)",
    )
    parser.add_argument("--print-env", action="store_true", help="print the decisions and stop")
    asked = parser.parse_args(arguments[:split])
    job: Job | None = None
    code = TrainingError.exit_code
    try:
        job = read_job(os.environ)
        _tell_start(job)
        plan = make_plan(
            job,
            look_at_node(job, os.environ, root),
            os.environ,
            asked.module,
            arguments[split + 1 :],
            asked.nproc,
            nsys.read(root, os.environ, job.run_id),
        )
        if asked.print_env or job.node_rank == 0:
            print(plan.block(), flush=True)
        else:
            _tell(plan.title)
        for warning in plan.warnings:
            _tell(f"WARNING: node {job.node_rank}: {warning}")
        code = 0 if asked.print_env else _recorded(plan)
    except TrainingError as error:
        # A wrong request is usually wrong on all nodes: one of them reports it.
        local = error.local or error.exit_code != RequestError.exit_code
        if job is None or job.node_rank == 0 or local:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = INTERRUPTED
    finally:
        if job is not None and not asked.print_env:
            _tell_end(job, code)
    return code


def _tell_start(job: Job) -> None:
    """Tell the launcher that this container has started, and log how long that took."""
    folder = start_folder.find(job, os.environ)
    if folder is not None:
        start_folder.sign(folder, job)
    launched = os.environ.get("LAUNCHED_AT", "")
    if launched.isdecimal() and job.node_rank == 0:
        _tell(f"the container is up, {max(0.0, time.time() - int(launched)):.0f} s after srun")


def _tell_end(job: Job, code: int) -> None:
    """Tell the launcher this node's exit code."""
    folder = start_folder.find(job, os.environ)
    if folder is not None:
        start_folder.end(folder, job, code)


def _recorded(plan: Plan) -> int:
    """Run, and record the start and the end in the run's folder; return the exit code."""
    job_log.begin(plan, os.environ)
    code = TrainingError.exit_code
    try:
        code = _run(plan)
        return code
    except TrainingError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        job_log.end(plan, os.environ, code)


def _check_flags(plan: Plan) -> Any:
    """Let the entry point read its flags before torch is loaded and nodes are waited for.

    Returns its configuration. Raises RequestError.
    """
    try:
        module = importlib.import_module(plan.module)
        if hasattr(module, "__path__"):  # a package is started by its __main__
            module = importlib.import_module(f"{plan.module}.__main__")
        configure = module.configure
    except (ImportError, AttributeError) as error:
        raise RequestError(f"--module: {plan.module} cannot be started: {error}") from error
    config = configure(plan.flags)
    if plan.job.shrink:
        _check_shrink(plan, config)
    return config


def _check_shrink(plan: Plan, config: Any) -> None:
    """Refuse SHRINK if the ranks do not support it; warn if not even one node can be lost."""
    if not isinstance(config, Config) or config.parallel.backend != "fsdp":
        raise RequestError(
            f"SHRINK: {plan.module} cannot go on with fewer nodes, as what trains by FSDP can "
            "(mamba_fsdp, llama_fsdp); fix: leave SHRINK out, and set SPARES=1 for a node in "
            "reserve"
        )
    nodes = plan.job.training - 1
    if plan.job.node_rank == 0 and (why := why_not_on(config, nodes * plan.processes)):
        _tell(f"WARNING: SHRINK: with {nodes} nodes it cannot go on, but is requeued: {why}")


def _run(plan: Plan) -> int:
    """Check, then run the processes; return their exit code. Raises TrainingError."""
    config = _check_flags(plan)
    ulimits.raise_limits(plan.limits)
    if plan.job.node_rank == 0 and plan.job.port:
        require_port(plan.job.port)
    os.environ.update({one.name: one.value for one in plan.variables})
    os.environ.update(plan.shim)
    if plan.nsys and plan.nsys.folder:
        with writing(plan.nsys.folder):
            plan.nsys.folder.mkdir(parents=True, exist_ok=True)
    preflight.run(plan, os.environ)
    failures = Ledger(plan.job, job_log.folders(plan, os.environ)).failures()
    replay.check(plan, failures, os.environ)
    if plan.job.shrink:
        os.environ[RANKS] = str(plan.job.training * plan.processes)
    return _start(plan, start_folder.find(plan.job, os.environ), config)


def _control(plan: Plan, config: Any) -> RestartControl:
    """Make the control that decides which failures lead to a restart in place."""
    run = getattr(config, "run", None)
    keeps_copies = getattr(run, "checkpoint_in_memory", False) is not False
    requeues = os.environ.get("REQUEUES", "")
    budget = Budget(
        restarts=plan.restarts,
        requeues=int(requeues) if requeues.isdecimal() and plan.job.id != ALONE else None,
        requeued=plan.job.restarts,
    )
    memory = MemoryFolder(
        plan.job.run_id,
        os.environ,
        memory_folder.places(os.environ),
        wanted=keeps_copies and plan.restarts > 0,
    )
    ledger = Ledger(plan.job, job_log.folders(plan, os.environ))
    return RestartControl(
        plan.job,
        ledger,
        budget,
        memory=memory,
        why_not_on=lambda nodes: why_not_on(config, nodes * plan.processes),
    )


def _start(plan: Plan, shared: Path | None, config: Any) -> int:
    """Run the processes, with a folder of compiled kernels that is this job's own, if planned."""
    own = [o.value for o in plan.variables if o.name == "TRITON_CACHE_DIR" and o.why != GIVEN]
    control = _control(plan, config)
    try:
        for folder in own:
            _tell(triton_cache.begin(Path(folder), os.environ))
        asks = shared if plan.job.node_rank == 0 else None
        code = agent.run(plan.torchrun, asks, control)
        if plan.job.node_rank == 0:
            _tell(control.goodput())
        for folder in own if plan.job.node_rank == 0 else ():
            _tell(triton_cache.keep(Path(folder), os.environ))
        return code
    finally:
        control.close()
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)


def take_signals_back() -> None:
    """Restore the signals that the container was started with as ignored."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _tell(text: str) -> None:
    if text:
        print(f"training.launch: {text}", flush=True)


if __name__ == "__main__":
    take_signals_back()
    cli.outlive()  # a full log disk ends no job
    sys.exit(main(sys.argv[1:]))
