"""State what ran and what came of it, in words: the rows of the table at the top of the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from training.report.history import Run


def summary(runs: list[Run]) -> dict[str, list[str]]:
    """Summarize every run; rows for which no run has anything are left out."""
    rows = {name: [tell(run) for run in runs] for name, tell in _ROWS.items()}
    return {name: cells for name, cells in rows.items() if any(cells)}


def _model(run: Run) -> str:
    facts = run.facts.get("model", {})
    name = _setting(run, "model.name", "general.full_name")
    family, parameters = str(facts.get("family") or ""), facts.get("parameters")
    named = f"{name} ({family})" if name and family else name or family
    counted = f"{_count(parameters)} parameters" if isinstance(parameters, int) else ""
    return ", ".join(part for part in (named, counted) if part)


def _batch(run: Run) -> str:
    """Return a step's sequences and tokens; for older runs, the tokens that its steps reported."""
    facts = run.facts.get("batch", {})
    sequences, tokens = facts.get("sequences"), facts.get("tokens")
    seen = run.steps.columns["tokens_seen"]
    if tokens is None and len(seen) > 1 and math.isfinite(seen[-1] - seen[-2]):
        tokens = round(seen[-1] - seen[-2])
    parts = [f"{sequences:,} sequences"] if isinstance(sequences, int) else []
    parts += [f"{tokens:,} tokens a step"] if isinstance(tokens, int) else []
    return ", ".join(parts)


def _rate(run: Run) -> str:
    peak = _setting(run, "optim.learning_rate", "optimizer.lr")
    schedule = _setting(run, "optim.schedule.name", "scheduler.name")
    return ", ".join(part for part in (f"{peak} at the peak" if peak else "", schedule) if part)


def _image(run: Run) -> str:
    if "image" not in run.facts:
        return ""
    image = run.facts["image"]
    parts = [
        f"{before}{value}"
        for name, before in (("target", ""), ("commit", "commit "), ("created", ""), ("file", ""))
        if (value := image.get(name))
    ]
    return ", ".join(parts) or "none of this project"


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items())


def _steps(run: Run) -> str:
    steps = run.settings.get("run.num_steps")
    return f"{run.last_step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")


def _best(run: Run) -> str:
    """Return the least loss and its step; losses that are not finite do not count."""
    columns = run.steps.columns
    pairs = zip(columns["loss"], columns["step"], strict=True)
    best = min(
        pairs, key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf, default=None
    )
    return f"{best[0]:.4f} ({best[1]:,.0f})" if best and math.isfinite(best[0]) else ""


def _last(run: Run) -> str:
    losses = run.steps.finite("loss")
    return f"{losses[-1]:.4f}" if losses else ""


def _evaluation(run: Run) -> str:
    """Return the last loss of each held-out set, after its label if it has one."""
    last = {label: table.finite("loss")[-1:] for label, table in run.evaluations.items()}
    return ", ".join(
        f"{label} {loss:.4f}".strip() for label, found in last.items() for loss in found
    )


def _median(column: str, form: str) -> Callable[[Run], str]:
    """Make a function that returns the median of a column of the reports."""

    def tell(run: Run) -> str:
        values = run.reports.finite(column)
        return format(statistics.median(values), form) if values else ""

    return tell


def _memory(run: Run) -> str:
    memory = run.reports.finite("memory_bytes")
    return f"{max(memory) / 2**30:.2f} GiB" if memory else ""


def _saves(run: Run) -> str:
    took, waited = run.saves.finite("seconds"), run.saves.finite("waited")
    if not took:
        return ""
    return (
        f"{len(took)}, {statistics.median(took):.3g} s each (median); "
        f"training waited {math.fsum(waited):.3g} s in all"
    )


_ROWS: dict[str, Callable[[Run], str]] = {
    "model": _model,
    "global batch": _batch,
    "learning rate": _rate,
    "ranks": lambda run: _setting(run, "world_size"),
    "image": _image,
    "versions": _versions,
    "steps": _steps,
    "tokens": lambda run: f"{run.tokens:,.0f}" if math.isfinite(run.tokens) else "",
    "last loss": _last,
    "best loss (at step)": _best,
    "last evaluation": _evaluation,
    "median seconds a step": _median("seconds_per_step", ".3g"),
    "median tokens/s a device": _median("tokens_per_second_per_device", ",.0f"),
    "median MFU": _median("mfu", ".1%"),
    "median share of waiting for data": _median("data_wait", ".2%"),
    "saves": _saves,
    "peak of memory": _memory,
}


def _setting(run: Run, *names: str) -> str:
    """Return the first of some settings that the run has, as text."""
    found: Any = next((run.settings[name] for name in names if run.settings.get(name)), "")
    return str(found)


def _count(number: int) -> str:
    """Write a large number in few characters, such as 129.1 M or 7.24 B."""
    for worth, letter in ((10**9, "B"), (10**6, "M")):
        if number >= worth:
            return f"{number / worth:.4g} {letter}"
    return f"{number:,}"
