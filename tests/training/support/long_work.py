"""Two ranks with a limit of LIMIT seconds on collective calls, one of which works longer.

usage: torchrun ... -m tests.training.support.long_work RANK (works|dies)
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from training import process_group

LIMIT, WORK = 4, 8


def main() -> None:
    group = process_group.start("cpu")
    # Use a separate group, because joining the others takes as long as they need to start.
    group = replace(group, control=dist.new_group(timeout=timedelta(seconds=LIMIT)))
    works = group.rank == int(sys.argv[1])

    def work() -> int:
        if works:
            time.sleep(WORK)
            if sys.argv[2] == "dies":
                os._exit(9)
        return group.rank

    assert group.together(work, copies=True) == group.rank
    print(f"rank {group.rank} goes on", flush=True)
    process_group.stop()


if __name__ == "__main__":
    main()
