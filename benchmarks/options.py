"""What all benchmarks share: flags, where results go, what a missed goal means, how they end."""

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
    """A parser with --small and --output, and --docs where the benchmark writes into a page."""
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
    """The command line; what is written when all is measured must have its place by now."""
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
    """The page that is written; None where none is."""
    chosen: Path | None = given.docs
    if chosen is None and folder(given) == RESULTS:
        chosen = ROOT / "docs" / "background"
    return None if chosen is None or given.page is None else chosen / given.page


def folder(given: argparse.Namespace) -> Path | None:
    """Where results go; None where none is kept."""
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
    """Keep a result as NAME.json, then `fill` the page; the exit code: 1 where a goal is missed."""
    place, written = folder(given), page(given)
    if place is not None:
        (place / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if written is not None and fill is not None:
        fill(written)
    return 0 if met or given.small else 1


def require_file(path: Path, flag: str = "--file") -> Path:
    """The squash file at a path, or a `MissingError` that says how one is made."""
    if not path.is_file():
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        raise MissingError(f"the squash file {shown} is not there", fix=f"make sqsh, or {flag}")
    return path


def run(main: Callable[[], int]) -> NoReturn:
    """Carry a benchmark out to its exit code; a known error is a few lines, not a traceback.

    When it is asked to end it leaves by way of every `finally`: nothing that it started stays.
    """
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
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
    for one in ENDING:  # another signal would cut short what follows
        if signal.getsignal(one) == _ended:
            signal.signal(one, lambda number, frame: None)
    sys.exit(128 + number)
