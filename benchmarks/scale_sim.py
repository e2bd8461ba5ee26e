"""Simulate what changes at 8, 64, 512 and 4,096 nodes, with models of what cannot be run here.

usage: python -m benchmarks.scale_sim [--output DIR] [--docs DIR]

Computes and simulates how an image reaches the nodes, what checkpoints and failures cost, how
processes meet and what they read (benchmarks/scale/, each number's source in facts.py). Writes
scale.json to benchmarks/results/, and into docs/background/ the tables and pictures of scale.md and
of the pages below it, the same every time, within a minute. Needs numpy and matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import options, pages
from benchmarks.scale import page, plots
from benchmarks.scale.study import study

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument("--docs", type=Path, default=page.FOLDER, metavar="DIR")
    given = parser.parse_args()
    for name in page.PAGES:
        if not (given.docs / name).is_file():
            parser.error(f"--docs: {given.docs} has no {name} to write the tables into")
    result = study()
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "scale.json").write_text(json.dumps(result, indent=2) + "\n")
    page.write(given.docs, result)
    pictures = plots.draw(result, given.docs / "scale")
    for row in result["saves"]:
        if row["background"]:
            print(
                f"{row['nodes']:,} nodes: a failure every {pages.seconds(row['mtbf_s'])}, a save "
                f"every {pages.seconds(row['interval_s'])}, goodput {row['goodput']:.1%}"
            )
    print(f"torchrun's c10d rendezvous holds {result['most_nodes']:,} nodes at most")
    pages_of = f"{len(page.PAGES)} pages in {given.docs}"
    print(f"wrote {given.output / 'scale.json'}, {pages_of}, {len(pictures)} pictures")
    return 0


if __name__ == "__main__":
    options.run(main)
