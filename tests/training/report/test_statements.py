"""What a report says about a run, how curves are smoothed, and what they may be drawn over."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.reports import (
    evaluation,
    history,
    made,
    report,
    saved,
    shown,
    step,
    write,
)
from training.report import curves
from training.report.curves import decay, moving_average
from training.report.history import read

FACTS: dict[str, Any] = {
    "model": {"family": "llama", "parameters": 6_738_415_616},
    "batch": {"sequences": 256, "tokens": 1_048_576},
    "image": {"target": "llama-fsdp", "commit": "abc", "created": "2026-01-01", "file": "/a.sqsh"},
}


@pytest.mark.processes
def test_the_page_begins_with_what_ran(tmp_path: Path) -> None:
    more = {"seconds_per_step": 0.5, "mfu": 0.4, "data_wait": 0.0125}
    lines = [*history(19), shown(20, **more), saved(10, 4.0, 0.5), saved(20, 6.0, 0.25)]
    page = made(tmp_path, write(tmp_path / "run", lines, world_size=64, facts=FACTS))
    row = page.row()
    assert row["model"] == "mamba-tiny (llama), 6.738 B parameters"
    assert row["global batch"] == "256 sequences, 1,048,576 tokens a step"
    assert row["image"] == "llama-fsdp, commit abc, 2026-01-01, /a.sqsh" and row["ranks"] == "64"
    assert row["median seconds a step"] == "0.5" and row["median MFU"] == "40.0%"
    assert row["median share of waiting for data"] == "1.25%"
    assert row["saves"] == "2, 5 s each (median); training waited 0.75 s in all"
    assert {"time of a step", "time of a save", "waiting for data"} < set(page.images)
    assert "Dashed: of which training waited." in " ".join(page.captions)


@pytest.mark.processes
def test_one_that_records_it_beside_an_older_run(tmp_path: Path) -> None:
    new = write(tmp_path / "new", history(12), facts={**FACTS, "image": {}})
    page = made(tmp_path, write(tmp_path / "old", history(12)), new)
    assert page.text.count("Training report: 2 runs") == 2
    assert [page.row(i)["image"] for i in (0, 1)] == ["", "none of this project"]
    assert page.row(0)["model"] == "mamba-tiny"


@pytest.mark.processes
def test_facts_that_are_none(tmp_path: Path) -> None:
    odd = {"model": {"family": None, "parameters": "many"}, "batch": 3, "image": [1]}
    row = made(tmp_path, write(tmp_path / "run", history(3), facts=odd)).row()
    assert row["model"] == "mamba-tiny" and "image" not in row
    assert row["global batch"] == "100 tokens a step"


def test_the_average_of_a_short_run_goes_through_the_middle_of_its_noise() -> None:
    chance = random.Random(1)
    true = [2 + 6 * math.exp(-step / 8) for step in range(40)]
    noisy = [loss + chance.gauss(0, 0.4) for loss in true]
    smooth = moving_average(noisy, decay(40))

    def error(curve: list[float]) -> float:
        return math.fsum((a - b) ** 2 for a, b in zip(curve, true, strict=True))

    assert error(smooth) < 0.5 * error(noisy)
    above = sum(a > b for a, b in zip(smooth[:20], true, strict=False))
    assert 3 <= above <= 17, "it does not lag behind a falling loss"


def test_the_averages_constant_goes_by_the_length_of_the_run() -> None:
    assert decay(40) == pytest.approx(2 / 3) and decay(400) == pytest.approx(1 - 2 / 51)
    assert decay(0) == decay(15) == 0.0, "too few to be smoothed"
    assert moving_average([3.0, 1.0], 0.0) == [3.0, 1.0]
    # The first alone; the second with one neighbor on each side; the third with all there are.
    averages = moving_average([1.0, math.nan, 4.0, 7.0], 0.5)
    assert averages[0] == 1.0 and math.isnan(averages[1])
    assert averages[2] == pytest.approx((0.25 * 1 + 4 + 0.5 * 7) / 1.75)


@pytest.mark.processes
def test_the_page_says_how_it_smooths(tmp_path: Path) -> None:
    page = made(tmp_path, write(tmp_path / "run", history(40)))
    assert "exponential moving average (EMA)" in page.captions[0]
    assert "1 - 2 / (span + 1)" in page.captions[0]


def test_training_time_adds_up_over_the_starts_of_a_run(tmp_path: Path) -> None:
    """Steps 11 to 15 are in no report: the run was stopped and restarted after them."""
    lines = [step(n) for n in range(1, 11)] + [shown(10, seconds_per_step=2.0)]
    lines += [step(n) for n in range(11, 21)] + [shown(20, seconds_per_step=1.0), saved(15, 1, 1)]
    lines += [step(n) for n in range(21, 24)]
    run = read(write(tmp_path / "run", lines), "run")
    seconds = list(run.steps.columns["training_seconds"])
    assert seconds[0] == 2.0 and seconds[9] == 20.0 and seconds[19] == 30.0
    assert seconds[-1] == 33.0, "as fast as in the last report"
    assert list(run.saves.columns["training_seconds"]) == [25.0]
    assert list(run.saves.columns["tokens_seen"]) == [1500.0]


def test_training_time_of_an_older_run_is_by_its_speed(tmp_path: Path) -> None:
    lines = [*(step(n) for n in range(1, 11)), shown(10, speed=25.0)]
    run = read(write(tmp_path / "run", lines, world_size=4), "run")
    assert run.steps.columns["training_seconds"][-1] == 10.0


@pytest.mark.parametrize("speed", [{"seconds_per_step": 1.0}, {"speed": 25.0}])
def test_training_time_of_a_run_that_began_with_anothers_steps(
    tmp_path: Path, speed: dict[str, float]
) -> None:
    """With load_ckpt_path: these took the other run's time."""
    lines = [step(n) for n in range(10_001, 10_101)]
    lines[50:50] = [shown(10_050, **speed)]
    run = read(write(tmp_path / "run", [*lines, shown(10_100, **speed)], world_size=4), "run")
    seconds = list(run.steps.columns["training_seconds"])
    assert (seconds[0], seconds[49], seconds[-1]) == (1.0, 50.0, 100.0)
    # The lines of the earlier steps are lost.
    lines = [shown(10_000, **speed), evaluation(9_990, 1.5), *lines]
    run = read(write(tmp_path / "torn", lines, world_size=4), "torn")
    assert list(run.steps.columns["training_seconds"]) == pytest.approx(range(1, 101))
    assert list(run.evaluations[""].columns["training_seconds"]) == [0.0]


@pytest.mark.processes
def test_over_time_before_the_first_report(tmp_path: Path) -> None:
    run = write(tmp_path / "young", history(3))
    done = report(run, "-o", tmp_path / "out", "--over=time")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr == (
        "error: --over=time: no run has recorded how long its steps take, which its reports do; "
        "fix: give --over=steps\n"
    )
    page = made(tmp_path, run, write(tmp_path / "older", history(20)), "--over=time")
    assert "without start-up, evaluations" in page.captions[0]
    assert page.notes == ["young: is not drawn: it has not recorded its training time yet"]


@pytest.mark.processes
def test_over_time_what_a_run_alone_has_that_cannot_be_drawn(tmp_path: Path) -> None:
    lines = [*history(2), evaluation(2, 1.5, label="wiki"), step(3)]
    young = write(tmp_path / "young", lines)
    page = made(tmp_path, young, write(tmp_path / "older", history(20)), "--over=time")
    assert "training loss" in page.images and "evaluation loss" not in page.images
    assert page.row()["last evaluation"] == "wiki 1.5000"
    assert "evaluation loss" in made(tmp_path, young).images


@pytest.mark.processes
def test_each_held_out_set_has_a_curve(tmp_path: Path) -> None:
    lines = [
        *(step(1), step(2), evaluation(2, 2.0, label="wiki"), evaluation(2, 9.0, label="code")),
        *(step(3), step(4), evaluation(4, 1.5, label="wiki"), evaluation(4, 8.0, label="code")),
        step(5),
    ]
    folder = write(tmp_path / "sets", lines)
    page = made(tmp_path, folder)
    assert page.row()["last evaluation"] == "wiki 1.5000, code 8.0000" and page.notes == []
    tables = read(folder, "sets").evaluations
    assert [list(table.columns["step"]) for table in tables.values()] == [[2, 4], [2, 4]]
    one = write(tmp_path / "one", [*history(4), evaluation(4, 1.0)])
    page = made(tmp_path, one, folder)
    assert [page.row(i)["last evaluation"] for i in (0, 1)] == [
        "1.0000",
        "wiki 1.5000, code 8.0000",
    ]
    # Resumed from a checkpoint before the last evaluations.
    page = made(tmp_path, write(tmp_path / "back", [*lines, step(3)]))
    assert page.row()["last evaluation"] == "wiki 2.0000, code 9.0000"


def test_curves_of_held_out_sets_are_named_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        curves, "_legend", lambda figure, entries: drawn.append([text for _, text in entries])
    )
    sets = [evaluation(3, 2.0, label="wiki"), evaluation(3, 9.0, label="code")]
    folders = [
        write(tmp_path / "plain", [*history(3), evaluation(3, 1.0)]),
        write(tmp_path / "none", history(3)),
        write(tmp_path / "sets", [*history(3), *sets]),
    ]
    runs = [read(folder, folder.name) for folder in folders]
    for chosen, legend in (
        (runs, ["plain", "sets: wiki", "sets: code"]),
        (runs[2:], ["wiki", "code"]),
        (runs[:1], ["each evaluation"]),
    ):
        drawn.clear()
        curves.draw_pictures(chosen, "steps")
        assert drawn[1] == legend


@pytest.mark.processes
def test_what_a_run_undid_of_its_saves_is_gone(tmp_path: Path) -> None:
    lines = [*history(20), saved(20, 9.0, 9.0), step(11), saved(11, 2.0, 1.0)]
    row = made(tmp_path, write(tmp_path / "run", lines)).row()
    assert row["saves"] == "1, 2 s each (median); training waited 1 s in all"
