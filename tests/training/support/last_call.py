"""Ranks that end with a collective call, while gloo's threads compete for a processor.

usage: torchrun ... -m tests.training.support.last_call
"""

from __future__ import annotations

import os
import sys

from training import process_group


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # gloo's threads inherit it
    group = process_group.start("cpu")
    sys.setswitchinterval(1000)
    for _ in range(50):
        group.gather(None)
    process_group.stop()


if __name__ == "__main__":
    main()
