"""Pre-train what a file describes: `python -m training --config FILE [key=value ...]`.

    torchrun --nproc_per_node=8 -m training --config configs/llama_fsdp.yaml run.num_steps=100

configs/ has a file for each of the known systems; docs/training.md lists the settings. Runs under
torchrun on any number of ranks, or alone. Exit codes: 0 done, 1 the run failed, 2 the request was
wrong, 85 stopped by SIGTERM after a checkpoint (start it again), 86 ended by its
watch as it made no progress.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from training.config.config import Config
from training.config.yaml import load
from training.entrypoint import enter, leave
from training.errors import RequestError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; write --config FILE [key=value ...]")


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    parser = _Parser(
        prog="python -m training",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="settings that count more")
    given, unknown = parser.parse_known_intermixed_args(list(arguments))
    return load(Path(given.config), [*given.changes, *unknown])


if __name__ == "__main__":
    leave(enter(configure, sys.argv[1:]))
