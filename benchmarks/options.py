"""What all benchmarks share: flags, where results go, what a missed goal means, how they exit."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sqshforge.errors import MissingError, SqshforgeError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILE = ROOT / "build" / "cpu-mamba.sqsh"
ENDING = (signal.SIGTERM, signal.SIGHUP)


def parser(description: str | None, page: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with --small and --output, and --docs if the benchmark writes into a page."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--small",
        action="store_true",
        help="a short run that tries the benchmark itself: no goal counts, and no result is kept",
    )
    made.add_argument(
        "--output", type=Path, metavar="DIR", help="[default: benchmarks/results, --small: none]"
    )
    made.set_defaults(page=page, docs=None)
    if page is not None:
        made.add_argument(
            "--docs",
            type=Path,
            metavar="DIR",
            help=f"where {page} lies, whose tables are written "
            "[default: docs/background; --output, --small: none is written]",
        )
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and check now that the results can be written at the end."""
    given = made.parse_args()
    place, written = folder(given), page(given)
    if written is not None and not written.is_file():
        made.error(f"--docs: {written.parent} has no {written.name} to write the tables into")
    if place is not None:
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            made.error(f"--output: the folder {place} cannot be made: {error.strerror}")
    for one in (place, written):
        if one is not None and not os.access(one, os.W_OK):
            made.error(f"{one} cannot be written to; --output names another folder for the result")
    return given


def page(given: argparse.Namespace) -> Path | None:
    """Return the page that the benchmark writes its tables into; None if it writes none."""
    chosen: Path | None = given.docs
    if chosen is None and folder(given) == RESULTS:
        chosen = ROOT / "docs" / "background"
    return None if chosen is None or given.page is None else chosen / given.page


def folder(given: argparse.Namespace) -> Path | None:
    """Return the folder for results; None if none are kept."""
    found: Path | None = given.output or (None if given.small else RESULTS)
    return found


def finish(
    given: argparse.Namespace,
    name: str,
    result: dict[str, Any],
    *,
    met: bool,
    fill: Callable[[Path], object] | None = None,
) -> int:
    """Store NAME.json, then `fill` the page; returns the exit code, 1 for a missed goal."""
    place, written = folder(given), page(given)
    if place is not None:
        (place / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if written is not None and fill is not None:
        fill(written)
    return 0 if met or given.small else 1


def require_file(path: Path, flag: str = "--file") -> Path:
    """Return the path of a squash file; raises `MissingError`, which says how to make one."""
    if not path.is_file():
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        raise MissingError(f"the squash file {shown} is not there", fix=f"make sqsh, or {flag}")
    return path


def run(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and exit with its code; a known error prints a few lines, not a traceback.

    A signal to end runs every `finally`, so nothing that the benchmark started is left behind.
    """
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup makes SIGHUP ignored
            signal.signal(number, _ended)
    try:
        code = main()
    except SqshforgeError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    sys.exit(code)


def _ended(number: int, frame: FrameType | None) -> NoReturn:
    for one in ENDING:  # another signal would interrupt the cleanup
        if signal.getsignal(one) == _ended:
            signal.signal(one, lambda number, frame: None)
    sys.exit(128 + number)
