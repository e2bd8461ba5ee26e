"""One self-contained HTML page about runs."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from training.report.curves import BLOCKS, OVER, PICTURES, SPANS, Picture
from training.report.history import Run, differing
from training.report.summary import summary

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; min-width: 9rem; }
td:first-child { color: #666; }
figure { margin: 1.5rem 0; }
figcaption { color: #666; font-size: 13px; }
img { max-width: 100%; }
""".strip()


def render_page(runs: list[Run], pictures: dict[str, bytes], over: str) -> str:
    """Return the page: what ran, what came of it, the curves, and how the settings differ."""
    title = f"Training report: {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}"
    rows = [[name, *cells] for name, cells in summary(runs).items()]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>\n{STYLE}\n</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _table(("run", *(run.name for run in runs)), rows),
        *_notes(runs, over),
    ]
    for picture in PICTURES:
        if picture.file in pictures:
            parts.append(_figure(picture, pictures[picture.file], over))
    parts += _settings(runs)
    return "\n".join([*parts, "</body></html>", ""])


def _figure(picture: Picture, png: bytes, over: str) -> str:
    image = base64.b64encode(png).decode()
    return (
        f'<figure><img alt="{escape(picture.title)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{escape(_caption(picture, over))}</figcaption></figure>"
    )


def _caption(picture: Picture, over: str) -> str:
    """Explain what a point is, how curves are smoothed, and what training time leaves out."""
    sentences = [f"A point: {picture.points}."]
    if picture.second:
        sentences.append(f"Dashed: {picture.second_points}.")
    if picture.is_noisy:
        sentences.append(
            f"Up to {BLOCKS} points are drawn pale under their exponential moving average (EMA), "
            "over both sides so that it does not lag (at the beginning only as far ahead as there "
            "are points behind), and corrected for bias, as the weights make up 1. Its "
            f"constant \N{GREEK SMALL LETTER BETA} is that of a span of 1/{SPANS} of the points: "
            "1 - 2 / (span + 1). Of more points, a curve has the means."
        )
    if over == "time":
        sentences.append(
            f"{OVER[over].title.capitalize()} is that of the steps, over all starts of a run: "
            "without start-up, evaluations, and the time between starts."
        )
    return " ".join(sentences)


def _notes(runs: list[Run], over: str) -> list[str]:
    lines = [f"{run.name}: {note}" for run in runs for note in run.notes]
    axis = OVER[over]
    lines += [
        f"{run.name}: is not drawn: it has not recorded its {axis.title} yet"
        for run in runs
        if len(run.steps) and not run.steps.has(axis.column)
    ]
    return ["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"] if lines else []


def _settings(runs: list[Run]) -> list[str]:
    rows = differing(runs)
    if not rows:
        return ["<p>The runs have the same settings.</p>"] if any(r.settings for r in runs) else []
    cells = [[name, *(_value(value) for value in values)] for name, values in rows.items()]
    head = "Settings" if len(runs) == 1 else "Settings in which the runs differ"
    return [f"<h2>{head}</h2>", _table(("setting", *(run.name for run in runs)), cells)]


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>'
