"""Measure how long packing takes, against the least possible time, and which resources it needs.

usage: python -m benchmarks.pack [--runs 5] [--small] [--no-reference] [--output DIR]

Packs one image of 2.0 GB (benchmarks/image.py) from a docker daemon of its own, in every supported
way, and compares the medians with the goals. Each row is a whole command; a round runs all of them,
in a different order each time, because what ran just before a row affects its time.
The first round does not count; the image's files are in the page cache.
Writes pack.json and pack.png to benchmarks/results/ and exits 1 if a goal is missed.

--small uses an image of 170 MB and one round, which counts.
Needs root (it mounts the daemon's layers, and runs two rows as an ordinary user) and docker.io; the
row with reflinks needs mkfs.xfs (xfsprogs), and one reference row tar2sqfs (squashfs-tools-ng).
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import image, options, report, rig
from benchmarks.options import ROOT
from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs
from sqshforge.host.resources import require_space
from sqshforge.host.terminal import Reporter
from tests.support.engines import daemon


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-reference", action="store_true", help="leave out what is run once")
    given = options.parse(parser)
    if given.runs < 1:
        parser.error("--runs must be at least 1")
    if given.small:
        given.runs, given.no_reference = 1, True
    result = measure(given.runs, small=given.small, references=not given.no_reference)
    report.show(result)
    met = all(bar["met"] for bar in result["bars"])
    code = options.finish(given, "pack", result, met=met)
    place = options.folder(given)
    if place is not None:
        report.draw(result, place / "pack.png")
    return code


def measure(runs: int, *, small: bool, references: bool) -> dict[str, Any]:
    """Set everything up, run the rounds, and leave nothing behind but the base's archive."""
    programs, reporter = Programs(), Reporter()
    if os.geteuid() != 0:
        raise MissingError("this benchmark mounts a daemon's layers", fix="run it as root")
    for program in ("setpriv", "mksquashfs", "mount", "umount"):
        programs.require(program)
    require_space(Path(tempfile.gettempdir()), int(1e9 if small else 8e9), "this benchmark")
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(daemon())
        socket = Path(host.removeprefix("unix://"))
        socket.parent.chmod(0o711)  # let the socket's group reach it
        os.environ["DOCKER_HOST"] = host
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix="sqshforge-bench-"))
        folder = Path(work)
        folder.chmod(0o711)
        bench = image.prepare(ROOT, folder, programs, reporter, small=small)
        bench.build(image.NAME)
        bed = rig.Rig(folder, bench, socket, programs)
        rig.expect_user(bed, socket.parent / "d")
        tree = stack.enter_context(bed.mounted())
        facts = {"packages": [] if small else image.PACKAGES, **rig.facts(tree, bed)}
        reflink = stack.enter_context(bed.reflinks())
        if not reflink:
            reporter.say("mkfs.xfs is not installed (xfsprogs): no row with reflinks")
        for name in ("warm", "edits", *(["reflink"] if reflink else [])):
            bed.warm(name)
        rows = bed.rows(reflink=reflink)
        took: dict[str, list[float]] = {row.name: [] for row in rows}
        orders = random.Random(0)
        for number in range(1 if small else 0, runs + 1):
            for row in orders.sample(rows, len(rows)):
                seconds = rig.timed(row, programs)
                reporter.say(f"round {number}: {row.name}: {seconds:.2f} s")
                if number:  # round 0 warms up
                    took[row.name].append(seconds)
        facts["sqsh_bytes"] = (folder / "root" / "out.sqsh").stat().st_size
        once = {
            row.name: rig.timed(row, programs) for row in (bed.references() if references else [])
        }
        peak = rig.peak(bed.cold_mounted(), socket.parent / "d" / "overlay2", programs)
    medians = {name: statistics.median(values) for name, values in took.items()}
    return {
        "what": "packing one image, whole commands, seconds; page cache warm, rows shuffled",
        "image": facts,
        "rows": [
            {
                "name": row.name,
                "what": row.what,
                "seconds": took[row.name],
                "median": round(medians[row.name], 3),
            }
            for row in rows
        ],
        "bars": [bar.result(medians) for bar in report.BARS if bar.row in medians],
        "reference": once,
        "peak": {"row": "cold, mounted", **peak},
        "machine": report.machine(bed.options.jobs),
        "tools": report.tools(programs),
    }


if __name__ == "__main__":
    options.run(main)
