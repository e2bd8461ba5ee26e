"""Compare the time to the first training step in a container with that of Python without one.

usage: python -m benchmarks.first_step [--file FILE] [--rounds N] [--small] [--output DIR] ...

Starts the training of cpu-mamba's tiny model with `sqshforge run FILE` and with this Python and the
packages of .venv, alternately, after one uncounted start of each that brings its files into memory.
For each it measures

seconds       from the command to the end of the first step
cpu_seconds   of all processes, to the end of the second step, which is the last one

and compares the medians. Goal: the first step in the container takes at most 1.3 times the seconds
of the one without. FILE is build/cpu-mamba.sqsh; its torch should be the same as in .venv. Writes
first_step.json to benchmarks/results/ and the table of docs/background/cold-start.md, and exits 1
if the goal is missed. Other load on the machine affects the CPU seconds less than the seconds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import hot, options, pages, report
from benchmarks.cold import starting
from benchmarks.cold.starting import Command
from benchmarks.options import ROOT
from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address
from sqshforge.squash import pack as squash
from sqshforge.squash.stage import Identity
from tests.support import containers

GOAL = 1.3  # times the seconds without a container
COLUMNS = ("seconds", "cpu_seconds")
PLACES = {"container": "by `sqshforge run`", "bare": "without a container"}
PAGE = ROOT / "docs" / "background" / "cold-start.md"


def main() -> int:
    parser = options.parser(__doc__, PAGE.name)
    parser.add_argument("--file", type=Path, default=options.FILE)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[default: 5]")
    given = options.parse(parser)
    if given.rounds < 1:
        parser.error("--rounds: at least 1")
    with tempfile.TemporaryDirectory(prefix="sqshforge-first-") as folder:
        place = Path(folder)
        file = small_file(place) if given.small else options.require_file(given.file)
        command = Command.small(place) if given.small else Command.of(file)
        result = measure(file, command, 1 if given.small else given.rounds)
    print(shown(result))

    def fill(path: Path) -> None:
        path.write_text(pages.fill(path.read_text(), {"first step": shown(result)}))

    met = result["ratio"]["seconds"] <= GOAL
    return options.finish(given, "first_step", result, met=met, fill=fill)


def small_file(place: Path) -> Path:
    """Pack the small run's image."""
    image, programs, reporter = hot.small_image(place), Programs(), Reporter()
    source, output = address.parse(image, programs), place / "small.sqsh"
    return rootless.call_as_root(
        lambda: squash.pack(source, output, squash.Options.of("shared"), programs, reporter).path,
        image,
        programs,
    )


def measure(file: Path, command: Command, rounds: int) -> dict[str, Any]:
    """Start alternately in the container and without; raises `SqshforgeError` if a start fails."""
    inside = containers.argv(file, "--", *command.inside)
    starts: Mapping[str, Callable[[], float]] = {
        "container": lambda: starting.until_first(inside, {})[0],
        "bare": lambda: starting.bare(command),
    }
    rows: dict[str, dict[str, list[float]]] = {
        name: {column: [] for column in COLUMNS} for name in starts
    }
    for start in starts.values():
        start()  # brings its files into memory
    for _ in range(rounds):
        for name, start in starts.items():
            before = report.cpu_seconds()
            rows[name]["seconds"].append(round(start(), 2))
            rows[name]["cpu_seconds"].append(round(report.cpu_seconds() - before, 2))
    medians = {
        name: {column: statistics.median(row[column]) for column in COLUMNS}
        for name, row in rows.items()
    }
    return {
        "what": "a start of training, everything in memory: seconds to the end of the first step",
        "how": "python -m benchmarks.first_step",
        "file": Identity.of(file).digest,
        "rows": rows,
        "medians": medians,
        "ratio": {
            column: round(medians["container"][column] / max(medians["bare"][column], 0.01), 2)
            for column in COLUMNS
        },
        "goal": GOAL,
        "machine": report.machine(len(os.sched_getaffinity(0))),
    }


def shown(result: Mapping[str, Any]) -> str:
    """The table of docs/background/cold-start.md."""
    if not result["rows"]:
        return "Not measured yet; `.venv/bin/python -m benchmarks.first_step` fills this in."
    lines = [
        [what, *(f"{result['medians'][name][column]:.2f} s" for column in COLUMNS)]
        for name, what in PLACES.items()
    ]
    ratio = result["ratio"]
    lines.append(
        [f"ratio (goal: {GOAL})", f"{ratio['seconds']:.2f}", f"{ratio['cpu_seconds']:.2f}"]
    )
    return pages.table(["start", "first step ends after", "CPU seconds"], lines)


if __name__ == "__main__":
    options.run(main)
