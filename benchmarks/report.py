"""The goals of packing, and the measurements as a table, a plot and JSON."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sqshforge.host.programs import Programs
from sqshforge.host.terminal import human, show_table
from tests.support.engines import CLIENT


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A goal: a row takes at most `factor` times the sum of other rows, or `factor` seconds."""

    row: str
    factor: float
    of: tuple[str, ...] = ()

    def seconds(self, medians: Mapping[str, float]) -> float:
        return self.factor * (sum(medians[name] for name in self.of) or 1.0)

    def goal(self) -> str:
        if not self.of:
            return f"<= {self.factor:g} s"
        of = " + ".join(self.of)
        return f"<= {self.factor:g} x {of if len(self.of) == 1 else f'({of})'}"

    def result(self, medians: Mapping[str, float]) -> dict[str, Any]:
        limit = self.seconds(medians)
        return {
            "row": self.row,
            "goal": self.goal(),
            "ratio": round(self.factor * medians[self.row] / limit, 3),
            "met": medians[self.row] <= limit,
        }


BARS = (
    Bar(row="cold, mounted", factor=1.15, of=("floor",)),
    # The daemon writes all layers to its own disk before it sends the first byte.
    Bar(row="cold, saved", factor=1.15, of=("save", "floor")),
    Bar(row="after an edit, by a user", factor=0.25, of=("cold, saved",)),
    Bar(row="after an edit", factor=0.25, of=("cold, mounted",)),
    Bar(row="after an edit, reflink", factor=0.10, of=("cold, mounted",)),
    Bar(row="nothing changed", factor=1.0),
)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def machine(jobs: int) -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "processors": jobs,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
    }


def tools(programs: Programs) -> dict[str, str]:
    asked: dict[str, list[str | Path]] = {
        "mksquashfs": ["mksquashfs", "-version"],
        "docker": [CLIENT, "--version"],
        "tar2sqfs": ["tar2sqfs", "--version"],
    }
    found = {
        name: programs.attempt(argv).out.partition("\n")[0]
        for name, argv in asked.items()
        if programs.which(str(argv[0]))
    }
    return {**found, "python": platform.python_version()}


def show(result: Mapping[str, Any]) -> None:
    """Print the result as tables."""
    bars = {bar["row"]: bar for bar in result["bars"]}
    table = Table("row", "median s", "ratio", "goal", "")
    for row in result["rows"]:
        bar = bars.get(row["name"])
        words = ["", "", ""]
        if bar is not None:
            words = [f"{bar['ratio']:.2f}", bar["goal"], "met" if bar["met"] else "MISSED"]
        table.add_row(row["name"], f"{row['median']:.2f}", *words)
    for name, seconds in result["reference"].items():
        table.add_row(name, f"{seconds:.2f}", "", "", "once")
    show_table(table)
    facts, peak = result["image"], result["peak"]
    print(
        f"image: {human(facts['bytes'])} in {facts['entries']} entries, "
        f"packed {human(facts['sqsh_bytes'])}\n"
        f"cold, mounted: at most {human(peak['peak_memory_bytes'])} of memory, "
        f"{human(peak['peak_extra_disk_bytes'])} of disk beyond output and cache; "
        f"the cache takes {human(peak['cache_bytes'])}"
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the medians with their goals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    medians = {row["name"]: row["median"] for row in result["rows"]}
    once = {f"{name} (once)": seconds for name, seconds in result["reference"].items()}
    values = {**medians, **once}
    met = {bar["row"]: bar["met"] for bar in result["bars"]}
    colors = [
        "#b0b7c3" if name not in met else "#2f7d5b" if met[name] else "#b5443a" for name in values
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(values) + 1.4))
    places = range(len(values))
    axes.barh(places, list(values.values()), color=colors, height=0.62)
    axes.set_yticks(places, list(values))
    axes.invert_yaxis()
    goals = {bar.row: bar.seconds(medians) for bar in BARS if bar.row in medians}
    for place, (name, seconds) in enumerate(values.items()):
        if name in goals:
            axes.plot([goals[name]] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
        end = max(seconds, goals.get(name, 0))
        axes.annotate(
            f"{seconds:.2f} s",
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.margins(x=0.12)
    axes.set_xlabel("seconds, whole command, median (less is better; the black line is the goal)")
    facts = result["image"]
    ratio = medians["cold, mounted"] / medians["floor"]
    axes.set_title(
        f"Packing takes {ratio:.2f} times what mksquashfs takes, and "
        f"{medians['after an edit']:.1f} s after an edit\n"
        f"(an image of {human(facts['bytes'])}, {facts['entries']:,} entries, "
        f"on {result['machine']['processors']} processors)",
        loc="left",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
