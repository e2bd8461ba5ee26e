"""How long a rebuild takes after an edit of training/, by engine; the goal is 5 s at most.

usage: python -m benchmarks.rebuild [--engine buildah|docker] [--rounds 5] [--small] [--output DIR]

Builds cpu-mamba once, then edits one file of a copy of training/ and builds again, `rounds` times,
and writes the median of the whole command to benchmarks/results/rebuild-ENGINE.json. Without
--engine, the engine that `sqshforge build` would take is measured.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import options
from benchmarks.options import ROOT
from sqshforge.host.programs import Programs

GOAL = 5.0  # seconds


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--engine", choices=("docker", "buildah"), default="buildah")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.small:
        given.rounds = 1
    programs = Programs()
    with tempfile.TemporaryDirectory(prefix="sqshforge-bench-") as folder:
        checkout = Path(folder)
        for name in ("sqshforge", "recipes", "images", "launch", "patches", "training"):
            shutil.copytree(ROOT / name, checkout / name)
        for name in ("bases", "vendor"):
            if (ROOT / "build" / name).is_dir():
                shutil.copytree(ROOT / "build" / name, checkout / "build" / name)
        argv = [sys.executable, "-m", "sqshforge", "build", "cpu-mamba", "--engine", given.engine]
        took = []
        for number in range(given.rounds + 1):
            (checkout / "training" / "edited.py").write_text(f"EDIT = {time.time()}\n")
            started = time.monotonic()
            programs.capture(argv, cwd=checkout)
            if number:  # the first one may build everything
                took.append(round(time.monotonic() - started, 2))
    median = statistics.median(took)
    print(f"{given.engine}: rebuild after an edit {median:.2f} s (median of {took}), goal {GOAL} s")
    result = {
        "what": "sqshforge build cpu-mamba after an edit of one file of training/, whole command",
        "engine": given.engine,
        "seconds": took,
        "median": median,
        "goal": GOAL,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "python": platform.python_version(),
    }
    return options.finish(given, f"rebuild-{given.engine}", result, met=median <= GOAL)


if __name__ == "__main__":
    sys.exit(main())
