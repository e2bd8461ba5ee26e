"""Handmade folders of runs, `python -m training.report` on them, and the page that it writes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any

from tests.training.support.runs import ROOT


def report(
    *arguments: object, to: IO[str] | int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.report", *map(str, arguments)]
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        command, env=whole, text=True, stdout=to, stderr=subprocess.PIPE, timeout=400
    )


def step(number: int, **other: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "loss": 5.0 / number + 1,
        "grad_norm": 2.0,
        "learning_rate": 1e-3 / number,
        "tokens_seen": number * 100,
        **other,
    }


def shown(number: int, speed: float = 1000.0, **other: Any) -> dict[str, Any]:
    more = {"tokens_per_second_per_device": speed, "memory_bytes": 3 * 2**29}
    return {**step(number), "kind": "report", **more, **other}


def write(folder: Path, lines: list[dict[str, Any]], *, end: str = "", **settings: Any) -> Path:
    """Write a run's folder with such lines, followed by the text `end`."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(li) + "\n" for li in lines) + end)
    config = {
        "config": {
            "model": {"name": "mamba-tiny", "sizes": {"d_model": 64}},
            "optim": {"learning_rate": settings.get("learning_rate", 1e-3), "betas": [0.9, 0.95]},
            "run": {"num_steps": settings.get("num_steps", 40), "save_ckpt_path": str(folder)},
        },
        "world_size": settings.get("world_size", 1),
        "versions": {"python": "3.11.2", "torch": settings.get("torch", "2.2.2")},
    }
    config |= settings.get("facts", {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved(number: int, seconds: float, waited: float) -> dict[str, Any]:
    return {"kind": "save", "step": number, "seconds": seconds, "waited": waited}


def evaluation(number: int, loss: float, **other: Any) -> dict[str, Any]:
    more = {"perplexity": 9.0, "tokens": 64, **other}
    return {"kind": "evaluation", "step": number, "loss": loss, **more}


def history(steps: int) -> list[dict[str, Any]]:
    return [
        line
        for number in range(1, steps + 1)
        for line in ([step(number), shown(number)] if number % 10 == 0 else [step(number)])
    ]


class Page(HTMLParser):
    """The tables, images and notes of a page."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.images: dict[str, bytes] = {}
        self.notes: list[str] = []
        self.captions: list[str] = []
        self._tag = ""
        self.text = (folder / "report.html").read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "img":
            found = {name: value or "" for name, value in attributes}
            kind, _, data = found["src"].partition(",")
            assert kind == "data:image/png;base64"
            self.images[found["alt"]] = base64.b64decode(data)

    def handle_data(self, data: str) -> None:
        if self._tag in ("td", "th"):
            self.tables[-1][-1][-1] += data.strip("\n")
        if self._tag == "li" and data.strip():
            self.notes.append(data)
        if self._tag == "figcaption" and data.strip():
            self.captions.append(data)

    def row(self, number: int = 0) -> dict[str, str]:
        """Return a run's row of the table at the top."""
        return {name: cells[number] for name, *cells in self.tables[0]}

    def settings(self) -> dict[str, list[str]]:
        return {name: values for name, *values in self.tables[1][1:]}


def made(tmp_path: Path, *arguments: object) -> Page:
    out = tmp_path / "out"
    done = report(*arguments, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}/report.html\n" and done.stderr == ""
    return Page(out)
