"""All processes of this node have ended, and torchrun does not notice.

Between two looks at its processes it asks the rendezvous on node 0 about the other nodes. A node
that is cut off waits there for as long as the kernel tries to send: a quarter of an hour.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

SECONDS = 180.0
"""How long they may have ended before that.

Longer than srun takes to end a step of which it has heard one task end: Slurm 22.05's srun waits
for ever for a task whose end it was not told, as when that came while the network was cut.
"""


def watch(children: Callable[[], Sequence[int]], leave: Callable[[list[int]], None]) -> None:
    """Call `leave` with the exit codes (-n: killed by signal n) if nobody collects them in time.

    `children` gives the processes' numbers. In a thread that ends with this process.
    """
    threading.Thread(target=_run, args=(children, leave), name="stuck", daemon=True).start()


def _run(children: Callable[[], Sequence[int]], leave: Callable[[list[int]], None]) -> None:
    since = None
    while True:
        time.sleep(1)
        codes = [_code(pid) for pid in children()]
        ended = [code for code in codes if code is not None]
        if not codes or len(ended) < len(codes):
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since > SECONDS:
            leave(ended)
            return


def _code(pid: int) -> int | None:
    """The exit code of a child that has ended and was not collected; None for one that runs."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # collected at this moment
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
