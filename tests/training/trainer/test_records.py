"""The fields of metrics.jsonl and config.json, which programs read: none may go or be renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import train, write_text
from training.loggers.records import RECORDS, WHEN

STEP = {"kind", "step", "loss", "grad_norm", "learning_rate", "tokens_seen"}
REPORT = {
    *STEP,
    *("tokens_per_second_per_device", "tokens_per_second", "seconds_per_step"),
    *("samples_per_second", "tflops", "mfu", "memory_bytes", "data_wait"),
}


def test_every_field_is_described() -> None:
    described = {kind: {"kind", *fields} for kind, fields in RECORDS.items()}
    assert described["step"] == STEP | {"skipped"}
    assert described["report"] == REPORT
    assert described["evaluation"] == {"kind", "step", "loss", "perplexity", "tokens", "label"}
    assert described["save"] == {"kind", "step", "seconds", "waited"}
    assert described.keys() == WHEN.keys()


@pytest.mark.processes
@pytest.mark.parametrize("background", [True, False])
def test_every_kind_of_record_and_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setenv("IMAGE", "/fsx/some.sqsh")
    data, save = write_text(tmp_path / "text"), tmp_path / "run"
    held_out = write_text(tmp_path / "held")
    flags = ("--report_interval=2", "--checkpoint_interval=2", f"--eval_dataset_path={held_out}")
    train(save, data, 2, 3, 4, *flags, f"--async_checkpoint={background}")
    found = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        kinds.setdefault(one["kind"], []).append(one)
    counts = {kind: len(records) for kind, records in kinds.items()}
    assert counts == {"step": 4, "report": 2, "evaluation": 1, "save": 2}
    assert all(set(one) == STEP for one in kinds["step"])
    assert all(set(one) == REPORT for one in kinds["report"])
    assert set(kinds["evaluation"][0]) == {"kind", "step", "loss", "perplexity", "tokens"}
    for report in kinds["report"]:
        rate = report["tokens_per_second"]
        assert rate == pytest.approx(2 * report["tokens_per_second_per_device"])
        assert rate * report["seconds_per_step"] == pytest.approx(2 * 3 * 17)
    for one, step in zip(kinds["save"], (2, 4), strict=True):
        assert set(one) == {"kind", "step", "seconds", "waited"} and one["step"] == step
        assert one["waited"] > 0 and (background or one["waited"] == one["seconds"])
    record = json.loads((save / "config.json").read_text())
    assert record["model"] == {"family": "mamba", "parameters": 266_112}
    assert record["batch"] == {"sequences": 6, "tokens": 102}
    assert record["image"] == {"file": "/fsx/some.sqsh"} and record["world_size"] == 2
    assert record["versions"]["torch"] and record["config"]["run"]["num_steps"] == 4
