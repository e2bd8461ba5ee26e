"""Run preflight by hand: `srun python3 -m training.job.preflight [--nproc N]`, one task per node.

It reads the job as training.launch does, but trains nothing; without Slurm it checks this machine.
Exit codes: 0 all well, 87 a bad node, 2 the request was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from training.cli import HelpFormatter
from training.errors import TrainingError
from training.job import preflight
from training.job.node import look_at_node
from training.job.plan import make_plan, read_job


def main(arguments: Sequence[str]) -> int:
    """Check this node with the others; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m training.job.preflight",
        description=str(__doc__),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="INT",
        help="processes on this node (default: one per accelerator)",
    )
    asked = parser.parse_args(arguments)
    try:
        job = read_job(os.environ)
        module = "training.job.preflight"
        preflight.run(
            make_plan(job, look_at_node(job), os.environ, module, (), asked.nproc), os.environ
        )
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
