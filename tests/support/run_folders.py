"""Folders of runs as training leaves them, and `sqshforge status` on them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from sqshforge.cli.main import cli
from training.job import job_log
from training.job.plan import Job, Node, Plan, make_plan

HOUR = 3600.0


def plan(run: Path, *, job: str = "4242", restart: int = 0, node: int = 0, **flags: object) -> Plan:
    """Return a node's part of a two-node job that trains in a folder."""
    words = {"save_ckpt_path": run, "dataset_path": "text:*.txt", **flags}
    return make_plan(
        Job(id=job, restarts=restart, node_rank=node, nodes=2, address="10.0.0.5", port=61000),
        Node(cores=2, address="10.0.0.5", interface="eth0", type_why="it has no DMI"),
        {"NPROC_PER_NODE": "4"},
        "training.mamba_fsdp",
        ["--model_name=mamba-tiny", *(f"--{name}={value}" for name, value in words.items())],
    )


def noted(
    run: Path, *codes: int | None, job: str = "4242", environment: Mapping[str, str] | None = None
) -> None:
    """Record starts of a job, each with its exit code; None for one that has not ended."""
    shown = {"NODES": "n1 n2", **(environment or {})}
    for restart, code in enumerate(codes):
        job_log.begin(plan(run, job=job, restart=restart), shown)
        if code is not None:
            job_log.end(plan(run, job=job, restart=restart), shown, code)


def step(number: int, loss: float | None = None) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "loss": 5.0 - number / 100 if loss is None else loss,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "tokens_seen": number * 4096,
    }


def report(number: int, speed: float = 1024.0, **other: Any) -> dict[str, Any]:
    """Return a report of ten steps; 1024 tokens/s on each of four devices are one step a second."""
    more = {"tokens_per_second_per_device": speed, "mfu": 0.25, "memory_bytes": 3 * 2**29}
    return {**step(number), "kind": "report", **more, **other}


def history(steps: int) -> list[dict[str, Any]]:
    return [
        line
        for number in range(1, steps + 1)
        for line in ([step(number), report(number)] if number % 10 == 0 else [step(number)])
    ]


def write(run: Path, lines: list[dict[str, Any]], *, num_steps: int = 1000, **data: Any) -> Path:
    """Write a run's folder with such lines, for four processes that report every ten steps."""
    run.mkdir(parents=True, exist_ok=True)
    config = {
        "config": {
            "model": {"name": "mamba-tiny"},
            "data": data,
            "run": {"num_steps": num_steps, "report_interval": 10},
        },
        "world_size": 4,
        "versions": {"python": "3.11.2"},
    }
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    age(run, 120, "config.json")
    return run


def age(run: Path, seconds: float, *names: str) -> None:
    """Make files look older: all of a run's, or the named ones."""
    paths = [run / name for name in names] if names else [run, *run.rglob("*")]
    for path in paths:
        found = path.stat()
        os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def facts(run: Path | str, *words: str) -> dict[str, Any]:
    """Return the facts of `sqshforge status RUN --json`, without starting a process."""
    done = CliRunner().invoke(cli, ["status", str(run), "--json", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.output)
    return found
