"""One HTML page about runs, which needs nothing beside it."""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from training.report.history import Run, differing
from training.report.pictures import PICTURES

HEAD = (
    "run",
    "steps",
    "tokens",
    "last loss",
    "best loss (at step)",
    "last evaluation",
    "median tokens/s a device",
    "peak of memory",
    "versions",
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right;
         vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
""".strip()


def page(runs: list[Run], pictures: dict[str, bytes]) -> str:
    """Write the page: what came out, the curves, and in which settings the runs differ."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>\n{STYLE}\n</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _table(
            HEAD,
            [_row(run) for run in runs],
        ),
        *_notes(runs),
    ]
    for picture in PICTURES:
        if picture.file in pictures:
            image = base64.b64encode(pictures[picture.file]).decode()
            parts.append(
                f'<p><img alt="{escape(picture.title)}" src="data:image/png;base64,{image}"></p>'
            )
    parts += _settings(runs)
    return "\n".join([*parts, "</body></html>", ""])


def _row(run: Run) -> list[str]:
    steps = run.settings.get("run.num_steps")
    losses = run.steps.columns["loss"]
    best = min(zip(losses, run.steps.columns["step"], strict=True), key=_loss, default=None)
    evaluations = run.evaluations.finite("loss")
    speeds = run.reports.finite("tokens_per_second_per_device")
    memory = run.reports.finite("memory_bytes")
    return [
        run.name,
        f"{run.last_step:,}" + (f" of {steps:,}" if isinstance(steps, int) else ""),
        f"{run.tokens:,.0f}" if math.isfinite(run.tokens) else "",
        f"{losses[-1]:.4f}" if losses else "",
        f"{best[0]:.4f} ({best[1]:,.0f})" if best and math.isfinite(best[0]) else "",
        f"{evaluations[-1]:.4f}" if evaluations else "",
        f"{statistics.median(speeds):,.0f}" if speeds else "",
        f"{max(memory) / 2**30:.2f} GiB" if memory else "",
        ", ".join(f"{name} {version}" for name, version in run.versions.items()),
    ]


def _loss(pair: tuple[float, float]) -> float:
    """Sort what is no loss behind all losses."""
    return pair[0] if math.isfinite(pair[0]) else math.inf


def _notes(runs: list[Run]) -> list[str]:
    lines = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return ["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"] if lines else []


def _settings(runs: list[Run]) -> list[str]:
    rows = differing(runs)
    if not rows:
        return ["<p>The runs have the same settings.</p>"] if any(r.settings for r in runs) else []
    told = [[name, *(_value(value) for value in values)] for name, values in rows.items()]
    head = "Settings" if len(runs) == 1 else "Settings in which the runs differ"
    return [f"<h2>{head}</h2>", _table(("setting", *(run.name for run in runs)), told)]


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>'
