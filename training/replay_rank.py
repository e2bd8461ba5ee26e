"""One rank of a replay: training.job.replay starts it by torchrun, on one node.

It takes a few steps from the newest checkpoint of the run with the given flags, and writes their
results; training.trainer.replay has the details.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from training import cli
from training.entrypoint import exit_code, leave
from training.imports import loading


def main(arguments: Sequence[str]) -> int:
    """Replay as training.job.replay asks; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m training.replay_rank",
        description=str(__doc__),
        formatter_class=cli.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--module", metavar="NAME", required=True, help="the run's entry point")
    parser.add_argument("--steps", metavar="INT", type=int, required=True, help="steps to take")
    parser.add_argument(
        "--scratch", metavar="DIR", required=True, help="folder that the replay may write to"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, required=True, help="the results, as JSON"
    )
    parser.add_argument("flags", metavar="FLAG", nargs="*", help="the flags of the run, after --")
    asked = parser.parse_args(arguments)

    def work() -> int:
        config = importlib.import_module(asked.module).configure(asked.flags)
        with loading():  # torch is not needed for --help
            from training.trainer.replay import replay, replayed

        return replay(replayed(config, asked.scratch), asked.steps, asked.output)

    return exit_code(work)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
