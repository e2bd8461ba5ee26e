"""The pictures of docs/background/scale.md, drawn of the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.scale import facts, failing, meeting, study

ALL_SERVERS = "mount, all servers"


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _image(result, folder / "image.png"),
        _saves(result, folder / "saves.png"),
        _rendezvous(result, folder / "rendezvous.png"),
    ]


def _image(result: Mapping[str, Any], path: Path) -> Path:
    figure, axes = _sheet()
    for way in dict.fromkeys(row["way"] for row in result["image"]):
        rows = [row for row in result["image"] if row["way"] == way]
        nodes = [row["nodes"] for row in rows]
        (line,) = axes.plot(nodes, [row["formula_s"] for row in rows], label=way)
        simulated = [row["simulated_s"] for row in rows]
        axes.plot(nodes, simulated, "o", color=line.get_color(), markersize=4)
    axes.set(
        xscale="log", yscale="log", xlabel="nodes", ylabel="seconds until all nodes have the image"
    )
    few, many = (
        next(one for one in result["image"] if (one["way"], one["nodes"]) == (ALL_SERVERS, nodes))
        for nodes in (facts.NODES[-2], facts.NODES[-1])
    )
    title = (
        f"{few['nodes']:,} nodes mount an image on all servers in {few['simulated_s']:.0f} s, "
        f"{many['nodes']:,} in {many['simulated_s']:.0f} s"
    )
    axes.set_title(f"{title}\nlines: formulas, points: simulated", fontsize="medium")
    return _save(figure, axes, path)


def _saves(result: Mapping[str, Any], path: Path) -> Path:
    figure, axes = _sheet()
    for nodes in facts.NODES:
        job = study.job(nodes, background=True)
        works = np.geomspace(10, 2e4, 200)
        lost = [1 - failing.goodput(job, work) for work in works]
        (line,) = axes.plot(works, lost, label=f"{nodes:,} nodes")
        rows = [row for row in result["failures"] if row["nodes"] == nodes]
        axes.plot(
            [row["interval_s"] for row in rows],
            [1 - row["simulated"] for row in rows],
            "o",
            color=line.get_color(),
            markersize=4,
        )
        best = failing.interval(job)
        axes.plot(best, 1 - failing.goodput(job, best), "k|", markersize=14)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="seconds of work between saves in the background",
        ylabel="share of the time that is lost",
    )
    most = facts.NODES[-1]
    best = failing.interval(study.job(most, background=True))
    title = f"{most:,} nodes lose least when they save every {best:.0f} s, fewer nodes less often"
    key = "lines: formula, points: simulated, strokes: the best by Daly"
    axes.set_title(f"{title}\n{key}", fontsize="medium")
    return _save(figure, axes, path)


def _rendezvous(result: Mapping[str, Any], path: Path) -> Path:
    figure, axes = _sheet()
    nodes = np.unique(np.geomspace(8, result["most_nodes"], 60).astype(int))
    at_once = [meeting.meeting(int(one), study.STORE).seconds for one in nodes]
    (line,) = axes.plot(nodes, at_once, label="torchrun's nodes meet, all at once")
    simulated = [
        row["at_once_simulated"] for row in result["rendezvous"] if "at_once_simulated" in row
    ]
    met = {one["joined"]: one["seconds"] for one in simulated if one["seconds"] < study.MINUTE}
    axes.plot(
        list(met),
        list(met.values()),
        "o",
        color=line.get_color(),
        markersize=4,
    )
    mesh = [row["mesh_s"] for row in result["rendezvous"]]
    axes.plot([row["nodes"] for row in result["rendezvous"]], mesh, label="gloo joins all ranks")
    most = result["most_nodes"]
    axes.axvline(most, color="black", linewidth=1, label=f"{most:,} nodes: the most that can meet")
    axes.axhline(facts.JOIN.value, color="gray", linestyle=":", label="timeout of training.launch")
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="seconds at the first node's store")
    title = f"At most {most:,} nodes can meet, and joining all their ranks by gloo takes far longer"
    axes.set_title(f"{title}\nlines: formulas, points: simulated", fontsize="medium")
    return _save(figure, axes, path)


def _sheet() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> Path:
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=80, metadata={"Software": None})
    return path
