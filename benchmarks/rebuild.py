"""How long `make sqsh` takes after an edit of training/, by engine; the goal is 5 s at most.

usage: python -m benchmarks.rebuild [--engine buildah|docker] [--rounds 5] [--small] [--output DIR]

With both engines, one after the other, unless --engine names one (--small: buildah alone);
docker by a daemon of its own.

In a clone of this checkout, builds and packs cpu-mamba once by `make sqsh`. Then, `rounds` times,
edits one file of training/ and runs `make sqsh` again; does so right after a commit; and packs an
image that was built after an edit, beside a cold pack of the same image, which is to take at least
four times as long. Writes the medians to benchmarks/results/rebuild-ENGINE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import options
from sqshforge.host.programs import Programs
from tests.support import checkouts
from tests.support.engines import CLIENT, daemon

ENGINES = ("buildah", "docker")
GOAL = 5.0  # seconds, of an edit's `make sqsh`
GOAL_PACK = 0.25  # of a cold pack
FROM_CACHE = "all but /sqshforge comes from the cache of bases"
# Of a make that runs this, and of a user who has chosen an engine.
FOREIGN = ("ENGINE", "OFFLINE", "TARGET", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")


@dataclass(frozen=True)
class Clone:
    """A clone of the checkout that is edited, and the engine that it is built with."""

    place: Path
    engine: str
    programs: Programs

    def edit(self, *, commit: bool = False) -> None:
        """Change one file of training/."""
        (self.place / "training" / "edited.py").write_text(f"EDIT = {time.time()}\n")
        if commit:
            git = [
                "git",
                "-C",
                str(self.place),
                "-c",
                "user.name=bench",
                "-c",
                "user.email=b@localhost",
            ]
            self.programs.capture([*git, "add", "training"])
            self.programs.capture([*git, "commit", "--quiet", "--message", "an edit"])

    def timed(self, *words: str, warm: bool = False) -> float:
        """How long a command takes, in seconds; a `warm` one packs from the cache of bases."""
        started = time.monotonic()
        said = self.programs.attempt(words, cwd=self.place)
        took = time.monotonic() - started
        if said.code != 0 or (FROM_CACHE in said.err) != warm:
            raise SystemExit(f"{' '.join(words)}:\n{said.out}{said.err}")
        return round(took, 2)

    def make(self, target: str, *, warm: bool = False) -> float:
        return self.timed("make", target, "TARGET=cpu-mamba", f"ENGINE={self.engine}", warm=warm)


def measure(clone: Clone, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind of command, a number for each round."""
    found: dict[str, list[float]] = {name: [] for name in ("edit", "commit", "pack", "cold")}
    cold = f".venv/bin/sqshforge pack cpu-mamba --engine {clone.engine}".split()
    cold += ["--no-cache", "--force", "-o", "build/cold.sqsh"]
    clone.make("sqsh")
    for _ in range(rounds):
        clone.edit()
        found["edit"].append(clone.make("sqsh", warm=True))
        clone.edit(commit=True)
        found["commit"].append(clone.make("sqsh", warm=True))
        clone.edit()
        clone.make("image")
        found["pack"].append(clone.make("sqsh", warm=True))
        found["cold"].append(clone.timed(*cold))
    return found


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for name in FOREIGN:
        os.environ.pop(name, None)
    engines = (given.engine,) if given.engine else ENGINES[: 1 if given.small else None]
    return max(of_engine(engine, given) for engine in engines)


def of_engine(engine: str, given: argparse.Namespace) -> int:
    """Measure one engine, and keep its result; the exit code: 1 where a goal is missed."""
    with contextlib.ExitStack() as stack:
        if engine == "docker":
            # Debian's own client first, which has BuildKit.
            os.environ["PATH"] = f"{CLIENT.parent}:{os.environ['PATH']}"
            os.environ["DOCKER_HOST"] = stack.enter_context(daemon())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sqshforge-bench-"))
        os.environ["SQSHFORGE_CACHE"] = f"{folder}/cache"
        place = checkouts.clone(Path(folder) / "clone")
        found = measure(Clone(place, engine, Programs()), 1 if given.small else given.rounds)
    medians = {name: statistics.median(took) for name, took in found.items()}
    ratio = round(medians["pack"] / medians["cold"], 3)
    slower = max(medians["edit"], medians["commit"])
    print(
        f"{engine}: make sqsh after an edit {medians['edit']:.2f} s, after a commit "
        f"{medians['commit']:.2f} s (goal {GOAL} s); packing alone {ratio} of a cold pack "
        f"(goal {GOAL_PACK}); medians of {found}"
    )
    result = {
        "what": "make sqsh TARGET=cpu-mamba after an edit of one file of training/ (edit), after a "
        "commit of it (commit), of an image that is built (pack), and a cold pack of that (cold)",
        "engine": engine,
        "seconds": found,
        "medians": medians,
        "pack_to_cold": ratio,
        "goals": {"seconds": GOAL, "pack_to_cold": GOAL_PACK},
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "python": platform.python_version(),
    }
    met = slower <= GOAL and ratio <= GOAL_PACK
    return options.finish(given, f"rebuild-{engine}", result, met=met)


if __name__ == "__main__":
    sys.exit(main())
