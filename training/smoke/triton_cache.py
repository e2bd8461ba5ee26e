"""Check that Triton is patched, and that its cache does what the patch is for.

Processes with equal random seeds and equal (faked) ids write the same files at the same time, as do
the ranks of a job that start from one script on several nodes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from training.errors import TrainingError

PROCESSES = 8
WRITES = 200  # of each process
WRITER = """
import json, os, random, sys
from triton.runtime.cache import FileCacheManager
random.seed(0)
os.getpid = lambda: 1
cache, faults = FileCacheManager("key"), []
for index in range(int(sys.argv[1])):
    content = bytes([index % 256]) * 20000
    try:
        path = cache.put(content, f"kernel-{index % 20}-{index % 256}")
        if open(path, "rb").read() != content:
            faults.append("a file was read that is not whole")
    except OSError as error:
        faults.append(type(error).__name__)
print(json.dumps(faults))
"""


def check_patch(path: str, wanted: str) -> str:
    """Compare a file of the installed Triton with its checksum after the patch.

    `path` is the file's path in Triton's repository. Raises TrainingError.
    """
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        raise TrainingError("triton is not installed")
    inside = path.removeprefix("python/").removeprefix("triton/")
    file = Path(found.submodule_search_locations[0]) / inside
    total = hashlib.sha256(file.read_bytes()).hexdigest()
    if total != wanted:
        raise TrainingError(f"{file} is not the patched file: its sum is {total}")
    return str(file)


def hammer_cache() -> str:
    """Write to one cache from many processes. Raises TrainingError if any write fails."""
    with TemporaryDirectory(prefix="smoke-triton-") as folder:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(WRITES)],
                env={"TRITON_CACHE_DIR": folder, "PATH": "/usr/bin:/bin"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(PROCESSES)
        ]
        said = [process.communicate(timeout=300) for process in running]
    for process, (_, err) in zip(running, said, strict=True):
        if process.returncode:
            last = err.strip().splitlines()[-1:] or ["it said nothing"]
            raise TrainingError(f"a writer ended with exit code {process.returncode}: {last[0]}")
    faults = [fault for out, _ in said for fault in json.loads(out)]
    total = PROCESSES * WRITES
    if faults:
        raise TrainingError(f"{len(faults)} of {total} writes failed: {', '.join(set(faults))}")
    return f"{total} writes of {PROCESSES} processes alike, none failed"
