r"""Pre-train the model that a file describes: `python -m training --config FILE [key=value ...]`.

    torchrun --nproc_per_node=8 -m training \
        --config configs/llama_fsdp.yaml run.num_steps=100

configs/ has a file for each of the known systems; docs/training/training.md lists the settings.
Runs under torchrun on any number of ranks, or alone. Exit codes: 0 done, 1 the run failed, 2 the
request was wrong, 85 stopped by SIGTERM after a checkpoint (start it again), 86 ended by its
watch because it made no progress.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from training.cli import Parser
from training.config.config import Config
from training.config.flags import settings_page
from training.config.yaml import load
from training.entrypoint import enter, leave
from training.errors import RequestError


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; fix: write --config FILE [key=value ...]")

    def format_help(self) -> str:
        return super().format_help() + settings_page(self._get_formatter())


def configure(arguments: Sequence[str]) -> Config:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    parser = _Parser("python -m training", str(__doc__))
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a YAML file")
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="settings that override the file"
    )
    given, unknown = parser.parse_known_intermixed_args(list(arguments))
    return load(given.config, [*given.changes, *unknown])


if __name__ == "__main__":
    leave(enter(configure, sys.argv[1:]))
