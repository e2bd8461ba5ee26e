"""Measure how long `make sqsh` takes after an edit of training/, per engine; goal: at most 5 s.

usage: python -m benchmarks.rebuild [--engine buildah|docker] [--rounds 5] [--small] [--output DIR]

Measures both engines, one after the other, unless --engine names one (--small: buildah only);
docker runs with a daemon of its own.

In a clone of this checkout, builds and packs cpu-mamba once with `make sqsh`. Then, `rounds` times,
it edits one file of training/ and runs `make sqsh` again; does the same right after a commit; and
packs an image that was built after an edit, both from the cache and cold; the cold pack should take
at least four times as long. Writes rebuild-ENGINE.json to benchmarks/results/, and the table of
docs/background/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import options, pages
from sqshforge.host.programs import Programs
from tests.support import checkouts
from tests.support.engines import CLIENT, daemon

ENGINES = ("buildah", "docker")
PAGE = options.ROOT / "docs" / "background" / "performance.md"
GOAL = 5.0  # seconds for `make sqsh` after an edit
GOAL_PACK = 0.25  # times the seconds of a cold pack
FROM_CACHE = "all but /sqshforge comes from the cache of bases"
# Variables of a `make` that runs this, or of the user, that would choose another engine or another
# checkout's code.
FOREIGN = ("ENGINE", "OFFLINE", "TARGET", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONPATH")


@dataclass(frozen=True)
class Clone:
    """A clone of the checkout, which is edited and built with one engine."""

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
        """Time a command in seconds; only a `warm` one may, and must, use the cache of bases."""
        said: list[str] = []
        started = time.monotonic()
        self.programs.follow(words, said.append, cwd=self.place)  # make stops its children as we do
        took = time.monotonic() - started
        if any(FROM_CACHE in line for line in said) != warm:
            raise SystemExit("\n".join([f"{' '.join(words)}:", *said]))
        return round(took, 2)

    def make(self, target: str, *, warm: bool = False) -> float:
        return self.timed("make", target, "TARGET=cpu-mamba", f"ENGINE={self.engine}", warm=warm)


def measure(clone: Clone, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of command, one number per round."""
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
    parser = options.parser(__doc__, PAGE.name)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    given = options.parse(parser)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    for name in FOREIGN:
        os.environ.pop(name, None)
    engines = (given.engine,) if given.engine else ENGINES[: 1 if given.small else None]
    return max(of_engine(engine, given) for engine in engines)


def of_engine(engine: str, given: argparse.Namespace) -> int:
    """Measure one engine and store its result; returns the exit code, 1 if a goal is missed."""
    with contextlib.ExitStack() as stack:
        if engine == "docker":
            # Debian's own client comes first, because it has BuildKit.
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

    def fill(path: Path) -> None:
        results = {**kept(options.folder(given)), engine: result}
        path.write_text(pages.fill(path.read_text(), {"rebuild": shown(results)}))

    return options.finish(given, f"rebuild-{engine}", result, met=met, fill=fill)


def kept(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return the results in a folder, by engine."""
    places = {engine: folder / f"rebuild-{engine}.json" for engine in ENGINES} if folder else {}
    return {
        engine: json.loads(path.read_text()) for engine, path in places.items() if path.exists()
    }


def shown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the table of docs/background/performance.md, with a column for each engine."""
    engines = [one for one in ENGINES if one in results]

    def cells(name: str) -> list[str]:
        return [f"{results[one]['medians'][name]:.1f} s" for one in engines]

    ratios = [f"{results[one]['pack_to_cold']:.2f}" for one in engines]
    return pages.table(
        ["`make sqsh` of cpu-mamba", *engines, "goal"],
        [
            ["after an edit of `training/`: build and pack", *cells("edit"), f"{GOAL:.0f} s"],
            ["after a commit of one", *cells("commit"), f"{GOAL:.0f} s"],
            ["its pack alone, to a cold one", *ratios, str(GOAL_PACK)],
            ["pack from nothing, profile `shared`", *cells("cold"), ""],
        ],
    )


if __name__ == "__main__":
    options.run(main)
