"""What torchrun starts to bind processes to cores or profile them: `... rank MODULE FLAGS...`.

It binds this process to the cores that RANK_CORES lists for it, and runs the module in it; for a
rank that RANK_NSYS names, it becomes nsys, which starts the module. It imports little, as every
process passes through it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence

CORES, NSYS = "RANK_CORES", "RANK_NSYS"
"""JSON from training.launch: each local rank's cores; nsys's `ranks` and command (`words`)."""


def main(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Run the module `words[0]` with its flags here; does not return if it is profiled."""
    cores = json.loads(environment.pop(CORES, "[]"))
    if cores:
        os.sched_setaffinity(0, cores[int(environment["LOCAL_RANK"])])
    profile = json.loads(environment.pop(NSYS, "{}"))
    if profile and (
        profile["ranks"] == "all" or environment["RANK"] in profile["ranks"].split(",")
    ):
        os.execv(profile["words"][0], [*profile["words"], sys.executable, "-u", "-m", *words])
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _help(words: Sequence[str]) -> None:
    from training.cli import Parser  # only for --help: every rank passes through this module

    parser = Parser("python3 -m training.job.rank", str(__doc__))
    parser.add_argument("module", metavar="MODULE", help="module to run")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of the module")
    parser.parse_args(list(words))


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        _help(sys.argv[1:])
    main(sys.argv[1:], os.environ)
