"""Replay by hand: `srun python3 -m training.job.replay [--steps N] -- FLAGS...`, one task a node.

FLAGS are those of the run; the replay starts from the run's newest checkpoint, and the run must not
be under way. Each node takes the same steps alone, with its own processes, and the results are
compared bit by bit. Exit codes: 0 the nodes agree, or none can be named, 87 a bad node, 1 it could
not be tried, 2 the request was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from training import cli
from training.errors import TrainingError
from training.job.node import look_at_node
from training.job.plan import make_plan, read_job
from training.job.replay import node


def main(arguments: Sequence[str]) -> int:
    """Replay on this node, and compare; return the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python3 -m training.job.replay",
        description=str(__doc__),
        formatter_class=cli.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--module",
        metavar="NAME",
        default="training.mamba_fsdp",
        help="the run's entry point (default: training.mamba_fsdp)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="INT",
        default=node.STEPS,
        help=f"how many steps to take (default: {node.STEPS})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        default=node.SECONDS,
        help=f"the time limit in seconds (default: {node.SECONDS:g})",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="INT",
        help="processes on each node (default: one per accelerator)",
    )
    asked = parser.parse_args(arguments[:split])
    if asked.steps < 1:
        parser.error("--steps: must be at least 1")
    try:
        job = read_job(os.environ)
        flags = arguments[split + 1 :]
        here = look_at_node(job)
        plan = make_plan(job, here, os.environ, asked.module, flags, asked.nproc)
        replay = node.Replay(plan=plan, steps=asked.steps, seconds=asked.seconds)
        verdict = replay.run(os.environ)
        if not verdict.was_tried:
            raise TrainingError(f"replay: {verdict.lines[0]}")
        node.conclude(plan, verdict, os.environ, print if job.node_rank == 0 else node.nothing)
    except TrainingError as error:
        if error.local or os.environ.get("SLURM_NODEID", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except node.Stopped as stopped:
        print(stopped, flush=True)
        return TrainingError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
