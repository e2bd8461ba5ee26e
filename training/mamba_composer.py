"""Pre-train Mamba with MosaicML's Composer: `composer -n 8 -m training.mamba_composer [FILE]`.

FILE is the system's config.yaml (default: the one in the current folder), with sections model,
data, optimizer, scheduler, fsdp, trainer and general. `python -m training.create_mamba_config`
writes one with every key. Settings after FILE override it: trainer.save_folder=DIR,
general.full_name=NAME. With --trial, a missing FILE is written, for a tiny model, with its data
beside it: Python's own sources.

Runs under Composer's launcher or torchrun on any number of ranks, or alone under python. Started
again, it continues from its newest checkpoint. Exit codes: 0 done, 1 the run failed, 2 the request
was wrong, 85 stopped by SIGTERM after a checkpoint (start it again). The launcher's exit code is
that of the first rank, which the launcher may have ended because another rank failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training.cli import Parser
from training.entrypoint import exit_code, leave
from training.errors import RequestError, TrainingError
from training.systems.composer import yaml
from training.systems.composer.config import ComposerConfig

FILE = Path("config.yaml")
NAMES = {"save_ckpt_path": "trainer.save_folder"}
"""Settings that the file has under other names."""


def tell(arguments: Sequence[str]) -> int:
    """Run `main`, and let every rank report its error.

    Composer's launcher ends all ranks once one has failed, so rank 0 may never get to it.
    """
    try:
        return main(arguments)
    except TrainingError as error:
        error.local = True
        raise


def configure(arguments: Sequence[str]) -> ComposerConfig:
    """Turn the command line into a configuration. Raises RequestError listing the faults."""
    parser = Parser("training.mamba_composer", str(__doc__))
    parser.add_argument(
        "--trial", action="store_true", help="write a missing FILE for a tiny model, and its data"
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=FILE, metavar="FILE", help="default: config.yaml"
    )
    parser.add_argument(
        "changes", nargs="*", metavar="SECTION.KEY=VALUE", help="settings that override the file"
    )
    asked = parser.parse_intermixed_args(list(arguments))
    if asked.trial:
        from training.systems.composer import trial  # which needs torch

        trial.prepare(asked.file)
    return yaml.read(asked.file, asked.changes)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises RequestError and TrainingError."""
    config = configure(arguments)
    if "GROUP_RANK" in os.environ:  # torchrun's name for Composer's NODE_RANK
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    try:
        import composer  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"Composer cannot be imported here ({error}); fix: use the image of target "
            "composer-mamba, or pip install mosaicml"
        ) from error
    # Neither torch nor Composer is needed to refuse a bad request.
    from training.systems.composer.trainer import run

    return run(config)


if __name__ == "__main__":
    leave(exit_code(lambda: tell(sys.argv[1:]), NAMES))
