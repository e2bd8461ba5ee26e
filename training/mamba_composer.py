"""Pre-train Mamba with MosaicML's Composer: `composer -n 8 -m training.mamba_composer [FILE]`.

FILE is the system's config.yaml (default: that of the current folder), with sections model, data,
optimizer, scheduler, fsdp, trainer and general. `python -m training.create_mamba_config` writes
one with every key.

Runs under Composer's launcher on any number of ranks, or alone under plain python. Started again,
it goes on from its newest checkpoint. Exit codes: 0 done, 1 the run failed, 2 the request was
wrong. The launcher's is that of the first rank, which it may have ended because another failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from training.composer import file
from training.convert.arguments import Parser
from training.door import leave, told
from training.errors import RequestError, TrainingError

FILE = Path("config.yaml")


def tell(arguments: Sequence[str]) -> int:
    """Do what `main` does, and let every rank tell its error.

    Composer's launcher ends all ranks once one has failed, so rank 0 may never come to it.
    """
    try:
        return main(arguments)
    except TrainingError as error:
        error.local = True
        raise


def main(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; the exit code. Raises RequestError and TrainingError."""
    parser = Parser("training.mamba_composer", str(__doc__))
    parser.add_argument("file", type=Path, nargs="?", default=FILE, metavar="FILE")
    config = file.read(parser.parse_args(list(arguments)).file)
    try:
        import composer  # noqa: F401
    except ImportError as error:
        raise RequestError(f"pip install mosaicml, which is missing here ({error})") from error
    # Neither torch nor Composer is needed to refuse a bad request.
    from training.composer.run import run

    return run(config)


if __name__ == "__main__":
    leave(told(lambda: tell(sys.argv[1:])))
