"""Two ranks, whose collective calls may take LIMIT seconds, of which one works for longer.

usage: torchrun ... -m tests.training.support.long_work RANK (works|dies)
"""

from __future__ import annotations

import os
import sys
import time

from training import process_group

LIMIT, WORK = 2, 6


def main() -> None:
    process_group.LONGEST = LIMIT
    group = process_group.start("cpu", hang_abort_seconds=1)
    works = group.rank == int(sys.argv[1])

    def work() -> int:
        if works:
            time.sleep(WORK)
            if sys.argv[2] == "dies":
                os._exit(9)
        return group.rank

    assert group.together(work, copies=True) == group.rank
    assert group.gather(group.rank) == [0, 1]
    print(f"rank {group.rank} goes on", flush=True)
    process_group.stop()


if __name__ == "__main__":
    main()
