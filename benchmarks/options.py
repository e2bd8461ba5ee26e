"""What all benchmarks share: their flags, where results go, and what a missed goal means."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --small and --output."""
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
    return made


def add_docs(made: argparse.ArgumentParser) -> None:
    """Add --docs, of a benchmark that writes into a page of the documentation."""
    made.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="where that page lies [default: docs/background; --output, --small: none is written]",
    )


def docs(given: argparse.Namespace) -> Path | None:
    """The folder of the page that is written; None where none is."""
    chosen: Path | None = given.docs
    return chosen or (ROOT / "docs" / "background" if folder(given) == RESULTS else None)


def folder(given: argparse.Namespace) -> Path | None:
    """Where results go; None where none is kept."""
    found: Path | None = given.output or (None if given.small else RESULTS)
    if found is not None:
        found.mkdir(parents=True, exist_ok=True)
    return found


def finish(given: argparse.Namespace, name: str, result: dict[str, Any], *, met: bool) -> int:
    """Keep a result as NAME.json; the exit code: 1 where a goal is missed."""
    place = folder(given)
    if place is not None:
        (place / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0 if met or given.small else 1
