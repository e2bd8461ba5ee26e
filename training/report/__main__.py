"""Plot what runs have logged: `python -m training.report RUN [RUN ...] -o DIR`.

RUN is a run's folder, with its metrics.jsonl and config.json; the run may still be under way. DIR
gets report.html, a self-contained page, and its pictures. The page shows what ran (model, batch,
learning rate, ranks, image, versions) and the results. It plots the loss, gradient norm and
learning rate of steps; the loss of evaluations; the seconds per step, tokens/s per device, MFU,
waiting for data and memory of reports; and the seconds of saves. Metrics that no run has logged are
left out. Loss and gradient norm are smoothed in a short run; with more than 400 steps, a curve
shows means, in a pale band from the minimum to the maximum. A dotted line marks where a loss is not
a number for the first time.
Exit codes: 0 done, 1 it failed, 2 the request was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from training.cli import Parser, run_command
from training.errors import RequestError, writing
from training.report.curves import OVER, draw_pictures
from training.report.history import read_runs, shown
from training.report.page import render_page

PAGE = "report.html"


def report(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    parser = Parser("python -m training.report", str(__doc__))
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write to"
    )
    parser.add_argument(
        "--over",
        choices=tuple(OVER),
        default="steps",
        help="x-axis of the curves; time: of the steps, over all starts (default: steps)",
    )
    given = parser.parse_args(list(arguments))
    folder: Path = given.output
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"--output: {folder} is not a folder")
    runs = read_runs(given.runs)
    pictures = draw_pictures(runs, given.over)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, image in pictures.items():
        _write(folder / name, image)
    _write(folder / PAGE, shown(render_page(runs, pictures, given.over)).encode())
    print(folder / PAGE)


def _write(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, as it may be open in a browser meanwhile."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.write_bytes(content)
        temporary.replace(path)


if __name__ == "__main__":
    sys.exit(run_command(report, sys.argv[1:]))
