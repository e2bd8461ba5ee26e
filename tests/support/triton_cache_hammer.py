"""Let many processes write to one Triton cache, identical in everything that can be identical.

usage: triton_cache_hammer.py [--processes 64] [--writes 1600] [--kills 0] FOLDER

Run with the Triton to be tested on PYTHONPATH. Each process has the same random seed and believes
it has the same process id, like ranks in containers on several nodes; all write the same names
under one key, and read each file back. `--kills` of them get SIGKILL on the way, and each is
replaced by another. Prints the outcome as JSON:

    writes   that completed, of processes that were not killed
    errors   how many writes failed, by the kind of error
    torn     files that were incomplete when read, either while others wrote or at the end
    staged   files in the cache at the end that have none of the names
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from triton.runtime.cache import FileCacheManager

NAMES = [f"kernel-{index}.cubin" for index in range(50)]
SIZE = 20_000  # bytes, of a small kernel
PID = 4242


@dataclass
class Outcome:
    """The outcome of the writes of one process, or of all."""

    writes: int = 0
    torn: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)


@functools.cache  # to test the cache, not the hash
def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(SIZE)


def write(count: int) -> Outcome:
    """Write as one process does."""
    random.seed(0)
    os.getpid = lambda: PID
    cache, outcome = FileCacheManager("key"), Outcome()
    for index in range(count):
        name = NAMES[index % len(NAMES)]
        try:
            path = cache.put(content(name), name)
            outcome.torn += Path(path).read_bytes() != content(name)
        except OSError as error:
            outcome.errors[type(error).__name__] += 1
        outcome.writes += 1
    return outcome


def start(count: int) -> tuple[int, int]:
    """Start a process that writes; returns its id and the pipe that its outcome comes through."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = write(count)
        said = [outcome.writes, outcome.torn, outcome.errors]
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    return pid, reading


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--writes", type=int, default=1600, help="of each process")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(given.folder)
    running = dict(start(given.writes) for _ in range(given.processes))
    choose = random.Random(1)
    for _ in range(given.kills):
        time.sleep(choose.uniform(0.01, 0.1))
        victim = choose.choice(list(running))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        os.close(running.pop(victim))
        running.update([start(given.writes)])
    whole = Outcome()
    for pid, reading in running.items():
        with os.fdopen(reading, "rb") as pipe:
            writes, torn, errors = json.loads(pipe.read())
        os.waitpid(pid, 0)
        whole.writes += writes
        whole.torn += torn
        whole.errors.update(errors)
    left = {path.name: path for path in (given.folder / "key").iterdir()}
    whole.torn += sum(left[name].read_bytes() != content(name) for name in NAMES if name in left)
    staged = sorted(set(left) - set(NAMES))
    said = {"writes": whole.writes, "errors": whole.errors, "torn": whole.torn, "staged": staged}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
