"""How long a rebuild takes after an edit of training/, by engine; the goal is 5 s at most.

usage: python benchmarks/rebuild.py [--engine buildah|docker] [--rounds 5]

Builds cpu-mamba once, then edits one file of a copy of training/ and builds again, `rounds` times,
and writes the median of the whole command to benchmarks/results/rebuild-ENGINE.json. Without
--engine, the engine that `sqshforge build` would take is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sqshforge.host.programs import Programs

ROOT = Path(__file__).resolve().parent.parent
GOAL = 5.0  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("docker", "buildah"), default="buildah")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
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
    path = ROOT / "benchmarks" / "results" / f"rebuild-{given.engine}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if median <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
