"""The node's part of a job: decide what depends on the node, then start torchrun there.

    python3 -m training.launch [--module training.mamba_fsdp] [--nproc N] [--print-env] -- FLAGS...

One task a node under `srun`, inside the container; alone, without Slurm, it is a job of one node.
Every decision is told in one block, and a variable of the same name overrides it. NCCL's and
libfabric's variables are not touched: aws-ofi-nccl sets what an instance wants.

Exit codes are those of the processes: 0 done, 1 failed, 2 the request was wrong, 85 stopped by
SIGTERM after a checkpoint (start it again), 128 + n death by signal n.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from training.errors import RequestError, TrainingError
from training.job import agent, kernels
from training.job.node import look
from training.job.plan import GIVEN, Job, Plan, make_plan, read_job


def main(arguments: Sequence[str]) -> int:
    """Run this node's part; the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python3 -m training.launch",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--module", default="training.mamba_fsdp", help="what torchrun starts")
    parser.add_argument("--nproc", type=int, help="processes on this node")
    parser.add_argument("--print-env", action="store_true", help="tell the decisions and stop")
    asked = parser.parse_args(arguments[:split])
    job: Job | None = None
    try:
        job = read_job(os.environ)
        plan = make_plan(
            job, look(job), os.environ, asked.module, arguments[split + 1 :], asked.nproc
        )
        if asked.print_env:
            print(plan.block())
            return 0
        _check_flags(plan)
        print(plan.block() if job.node_rank == 0 else f"training.launch: {plan.title}", flush=True)
        return _start(plan)
    except TrainingError as error:
        # What is wrong with a request is the same on all nodes: one of them says it.
        local = error.exit_code != RequestError.exit_code
        if job is None or job.node_rank == 0 or local:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _check_flags(plan: Plan) -> None:
    """Let the door read its flags before torch is loaded and nodes are waited for."""
    try:
        module = importlib.import_module(plan.module)
        if hasattr(module, "__path__"):  # a package is started by its __main__
            module = importlib.import_module(f"{plan.module}.__main__")
        configure = module.configure
    except (ImportError, AttributeError) as error:
        raise RequestError(f"--module: {plan.module} cannot be started: {error}") from error
    configure(plan.flags)


def _start(plan: Plan) -> int:
    """Run the processes; the folder of compiled kernels that is this job's own goes with it."""
    os.environ.update({one.name: one.value for one in plan.variables})
    own = [o.value for o in plan.variables if o.name == "TRITON_CACHE_DIR" and o.why != GIVEN]
    try:
        for folder in own:
            _tell(kernels.begin(Path(folder), os.environ))
        code = agent.run(plan.torchrun)
        for folder in own if plan.job.node_rank == 0 else ():
            _tell(kernels.keep(Path(folder), os.environ))
        return code
    finally:
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)


def _tell(text: str) -> None:
    if text:
        print(f"training.launch: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
