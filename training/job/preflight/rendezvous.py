"""A store of torch, in a process of node 0, where the workers of several nodes find each other.

Like the workers, it has a process of its own, so that training.launch has no thread of torch, nor
torch's messages about connections in its log.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

from training.cli import Parser
from training.imports import loading
from training.job.preflight.finding import call_with_timeout


class Rendezvous:
    """The store's process; it is started at once, as loading torch takes seconds."""

    def __init__(self) -> None:
        self._port = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "training.job.preflight.rendezvous"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def port(self, seconds: float) -> int:
        """Wait for the store's port. Raises OSError if there is none in time."""
        if not self._port:
            assert self._process.stdout is not None
            line = call_with_timeout(seconds, self._process.stdout.readline)
            if not line:
                raise OSError("the store of the all-reduce cannot be opened on the first node")
            self._port = int(line)
        return self._port

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Keep a store at any free port, which it prints, until standard input ends."""
    with loading():
        from torch.distributed import TCPStore

    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    Parser("python3 -m training.job.preflight.rendezvous", str(__doc__)).parse_args()
    main()
