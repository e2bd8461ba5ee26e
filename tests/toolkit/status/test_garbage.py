"""`sqshforge status` on records that are valid JSON but make no sense always gives a result."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from sqshforge.host.programs import Programs
from sqshforge.status.report import lines, row
from sqshforge.status.run import OWN, Clock, look
from tests.support.run_folders import facts, history, noted, step, write

HUGE = 10**400
START = {"kind": "start", "job": "4242", "restart": 0, "nodes": 1, "processes": 1}


def status(place: Path, **files: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON and the text for a run with these records appended to its own."""
    run = write(place / "run", history(20))
    (run / "jobs").mkdir(exist_ok=True)
    (run / "checkpoints/step_20_ckp").mkdir(parents=True, exist_ok=True)
    job = [START, {**START, "kind": "end", "code": 0, "time": 1.0}]
    for name, own, key in (
        ("metrics.jsonl", history(20), "metrics"),
        ("jobs/4242.jsonl", job, "job"),
    ):
        records = [*own, *files.get(key, [])]
        (run / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    for name, key in (("config.json", "config"), ("checkpoints/step_20_ckp/manifest.json", "kept")):
        for one in files.get(key, []):
            (run / name).write_text(json.dumps(one))
    seen = look(run, Clock(0.0, OWN))
    row(seen)
    document = json.dumps(seen.document(), allow_nan=False)
    return json.loads(document), lines(seen, "4242")


@pytest.mark.parametrize("kind", [[], {}, None, 5])
def test_a_record_whose_kind_is_no_word(tmp_path: Path, kind: object) -> None:
    shown, _ = status(tmp_path, metrics=[{"kind": kind, "step": 21, "x": "step"}])
    assert shown["progress"]["step"] == 20


@pytest.mark.parametrize(
    "time",
    [1_764_000_000_000_000_000, 1e18, -1e18, HUGE, math.inf],
    ids=["ns", "1e18", "-1e18", "huge", "inf"],
)
def test_a_time_that_no_calendar_has(tmp_path: Path, time: float) -> None:
    failure = {"kind": "failure", "time": time, "since": time, "why": "lost", "then": "requeue"}
    end = {**START, "kind": "end", "code": 1, "time": time}
    shown, page = status(tmp_path, job=[{**START, "time": time}, failure, end])
    start = shown["jobs"][0]["starts"][-1]
    assert start["time"] is start["end"]["time"] is start["failures"][0]["time"] is None
    assert any("exit code 1" in line for line in page)


@pytest.mark.parametrize("count", [HUGE, -HUGE, 2**63], ids=["huge", "-huge", "65 bits"])
def test_a_number_beyond_what_anything_counts(tmp_path: Path, count: int) -> None:
    run = {"num_steps": count, "report_interval": count}
    config = {"config": {"run": run}, "world_size": count}
    lines = [{**step(22), "step": count}, {**step(21), "tokens_seen": count}]
    shown, _ = status(tmp_path, config=[config], metrics=lines)
    assert shown["settings"]["num_steps"] is shown["settings"]["world_size"] is None
    assert shown["progress"]["step"] == 21 and shown["progress"]["tokens_seen"] is None


OPENED = ("metrics.jsonl", "config.json", "jobs/4242.jsonl", "hang.txt", "ep0-ba20-rank0.pt")


@pytest.mark.processes
@pytest.mark.parametrize("name", [*OPENED, "checkpoints/step_20_ckp/manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_would_never_end_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    """A run may belong to another user, and all runs are examined."""
    status(tmp_path)
    place = tmp_path / "run" / name
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    code = "import sys; from pathlib import Path; from sqshforge.status.run import look, Clock\n"
    code += "print(look(Path(sys.argv[1]), Clock(0.0, '')).state.value)"
    limit = f'ulimit -v {4 << 20}; exec "$@"'  # kilobytes
    argv: list[str | Path] = ["sh", "-c", limit, "sh", sys.executable, "-c", code]
    done = Programs().attempt([*argv, tmp_path / "run"], timeout=120)
    assert (done.code, done.err) == (0, ""), done


def test_one_garbage_record_hides_no_other_run(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        noted(write(tmp_path / name, history(20)), None)
    with (tmp_path / "bad/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": [], "step": 21, "a": "step"}) + "\n")
        file.write("[" * 100_000 + '"step"\n')
    shown = {name: facts(tmp_path / name)["progress"]["step"] for name in ("good", "bad")}
    assert shown == {"good": 20, "bad": 20}


NUMBERS = some.sampled_from([HUGE, -HUGE, 2**63, -(2**63), 1e308, -1e308, 5e-324, 1e18, -1, 0])
TEXT = some.text(some.characters()) | some.sampled_from(["/\0", "/\ud800", "/" + "a" * 300, "/"])
ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | TEXT | NUMBERS,
    lambda inner: some.lists(inner) | some.dictionaries(TEXT, inner),
    max_leaves=5,
)
STEP = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "skipped", "label")
REPORT = ("tokens_per_second_per_device", "mfu", "memory_bytes", "perplexity", "tokens")
NOTE = ("time", "job", "restart", "nodes", "spares", "processes", "host", "hosts", "module", "run")
MORE = (
    "image",
    "requeues",
    "restarts",
    "code",
    "meaning",
    "why",
    "step",
    "since",
    "then",
    "because",
)
COST = ("seconds", "lost", "repeated")


def record(kinds: list[str], *names: str) -> some.SearchStrategy[Any]:
    """Draw a record with any of these names, each likely a number; or anything else."""
    values = {name: NUMBERS | some.integers(0, 30) | some.floats() | ANYTHING for name in names}
    kind = some.sampled_from(kinds) | ANYTHING
    return some.fixed_dictionaries({"kind": kind}, optional=values) | ANYTHING


def sections(**names: tuple[str, ...]) -> some.SearchStrategy[Any]:
    parts = {
        name: some.dictionaries(some.sampled_from(keys), ANYTHING | NUMBERS) | ANYTHING
        for name, keys in names.items()
    }
    return some.fixed_dictionaries({}, optional=parts) | ANYTHING


OWN_SETTINGS = sections(
    run=("num_steps", "report_interval", "compile_only"),
    model=("name",),
    data=("epochs", "eval_dataset_path", "eval_paths", "global_batch_size", "seq_len"),
)
LENGTHS = some.sampled_from(["1e999ba", "9e99tok", "10ba", "20tok", ".5e-400tok"])
COMPOSERS = some.fixed_dictionaries(
    {
        "scheduler": some.fixed_dictionaries({"t_max": LENGTHS | ANYTHING}),
        "data": some.dictionaries(
            some.sampled_from(["global_batch_size", "seq_len"]), NUMBERS | some.integers(-2, 2)
        ),
    }
)


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(
    metrics=some.lists(record(["step", "report", "evaluation"], *STEP, *REPORT), max_size=12),
    job=some.lists(
        record(["start", "failure", "training", "end"], *NOTE, *MORE, *COST), max_size=4
    ),
    config=some.fixed_dictionaries(
        {"config": OWN_SETTINGS | COMPOSERS}, optional={"world_size": NUMBERS | ANYTHING}
    )
    | ANYTHING,
    kept=some.fixed_dictionaries({"files": some.dictionaries(TEXT, ANYTHING)}) | ANYTHING,
)
def test_whatever_is_json_ends_in_a_result(
    metrics: list[Any], job: list[Any], config: object, kept: object
) -> None:
    with tempfile.TemporaryDirectory() as name:
        status(Path(name), metrics=metrics, job=job, config=[config], kept=[kept])
