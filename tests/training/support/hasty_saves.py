"""The entry point with hours of a microsecond: `checkpoint_minutes=auto` saves every step."""

import sys

from training.checkpoint import interval
from training.entrypoint import enter, leave
from training.mamba_fsdp import configure

if __name__ == "__main__":
    interval.FIRST = interval.SHORTEST = interval.LONGEST = 1e-6
    leave(enter(configure, sys.argv[1:]))
