"""Smoke test of an image, run inside it: `python3 -m training.smoke [--json] [--meta FOLDER]`.

Checks the installed versions against the image's lock, the imports and launchers that its recipe
names, and that training works: the loss falls on real text, and a resumed run repeats the losses of
the uninterrupted one. On a CPU they must be equal to the bit; on an accelerator they may differ by
0.1% at the first step and by 5% later. Exit codes: 0 all good, 1 a check failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from training.cli import HelpFormatter
from training.smoke.checks import Check, Step, plan

META = Path("/sqshforge/meta")


def run_checks(meta: Path, report: Callable[[str], None]) -> list[Check]:
    """Run every check; one that fails does not stop the others.

    The start of each is reported as `[5 of 14, 38%] import torch`.
    """
    lock: dict[str, Any] = {}
    recipe: dict[str, Any] = {}

    def read(result: Check) -> None:
        lock.update(json.loads((meta / "lock.json").read_text()))
        recipe.update(_recipe(meta / "recipe.yaml"))
        result.detail = str(meta)

    first = _run_step(Step("meta", read))
    with TemporaryDirectory(prefix="smoke-") as folder:
        steps = list(plan(meta, lock, recipe, Path(folder)))
        done, passed, total = [first], 0.0, sum(step.weight for step in steps)
        for number, step in enumerate(steps, 2):
            report(f"[{number} of {len(steps) + 1}, {100 * passed / total:.0f}%] {step.name}")
            done.append(_run_step(step))
            passed += step.weight
    return done


def _run_step(step: Step) -> Check:
    result, began = Check(step.name), time.perf_counter()
    try:
        step.run(result)
        result.ok = True
    except Exception as error:
        result.detail = str(error) or type(error).__name__
    result.seconds = round(time.perf_counter() - began, 2)
    return result


def _recipe(path: Path) -> dict[str, Any]:
    import yaml  # only the smoke test reads YAML

    return yaml.safe_load(path.read_text()) or {}


def table(checks: list[Check]) -> str:
    """Format the checks for people."""
    width = max(len(check.name) for check in checks)
    lines = [
        f"{'ok' if c.ok else 'FAIL':<4}  {c.name:<{width}}  {c.seconds:7.1f} s  {c.detail}".rstrip()
        for c in checks
    ]
    failed = sum(not check.ok for check in checks)
    total = sum(check.seconds for check in checks)
    verdict = (
        f"{failed} of {len(checks)} checks failed" if failed else f"{len(checks)} checks passed"
    )
    return "\n".join([*lines, f"{verdict} in {total:.1f} s"])


def flat(check: Check) -> dict[str, Any]:
    """Flatten a check for JSON: its figures stand beside the other fields."""
    record = asdict(check)
    figures: dict[str, Any] = record.pop("figures")
    return {**figures, **record}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m training.smoke",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument(
        "--meta",
        type=Path,
        metavar="FOLDER",
        default=META,
        help=f"the image's own metadata (default: {META})",
    )
    given = parser.parse_args(arguments)
    checks = run_checks(given.meta, lambda text: print(text, file=sys.stderr, flush=True))
    ok = all(check.ok for check in checks)
    if given.json:
        print(json.dumps({"ok": ok, "checks": [flat(check) for check in checks]}))
    else:
        print(table(checks))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
