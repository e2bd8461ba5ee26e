"""Reports by the command line: every state that a run's folder can have, and pages that open."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.training.support.reports import (
    Page,
    evaluation,
    history,
    made,
    report,
    shown,
    step,
    write,
)
from tests.training.support.runs import ROOT, train, write_text
from training.report.curves import blocks

pytestmark = pytest.mark.processes

PICTURES = {"gradient-norm.png", "learning-rate.png", "loss.png", "memory.png", "throughput.png"}
PNG = b"\x89PNG\r\n\x1a\n"


def test_one_run(tmp_path: Path) -> None:
    page = made(tmp_path, write(tmp_path / "run", history(40)))
    assert page.row() == {
        "run": "run",
        "model": "mamba-tiny",
        "global batch": "100 tokens a step",
        "learning rate": "0.001 at the peak",
        "ranks": "1",
        "versions": "python 3.11.2, torch 2.2.2",
        "steps": "40 of 40",
        "tokens": "4,000",
        "last loss": "1.1250",
        "best loss (at step)": "1.1250 (40)",
        "median tokens/s a device": "1,000",
        "peak of memory": "1.50 GiB",
    }
    assert "<h1>Training report: run</h1>" in page.text
    assert page.settings()["optim.betas"] == ["[0.9, 0.95]"] and page.notes == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == PICTURES | {"report.html"}
    assert len(page.images) == 5
    held = {(tmp_path / "out" / name).read_bytes() for name in PICTURES}
    assert held == set(page.images.values()) and all(png.startswith(PNG) for png in held)
    assert not re.search(r'(src|href)=(?!"data:)|@import|url\(', page.text)  # self-contained


def test_runs_of_different_lengths_and_settings(tmp_path: Path) -> None:
    write(tmp_path / "a" / "run", history(40), learning_rate=1e-3)
    write(tmp_path / "b" / "run", history(15), learning_rate=3e-3, world_size=4, torch="2.13.0")
    page = made(tmp_path, tmp_path / "a" / "run", tmp_path / "b" / "run", "--over", "tokens")
    assert [page.row(i)["run"] for i in (0, 1)] == ["a/run", "b/run"]
    assert [page.row(i)["steps"] for i in (0, 1)] == ["40 of 40", "15 of 40"]
    assert page.settings() == {"optim.learning_rate": ["0.001", "0.003"], "world_size": ["1", "4"]}
    assert page.row(1)["versions"] == "python 3.11.2, torch 2.13.0"


def test_runs_of_the_same_settings(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, history(12)) for name in ("one", "two")]
    page = made(tmp_path, *runs)
    assert len(page.tables) == 1 and "The runs have the same settings." in page.text


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(23), end='{"kind": "step", "step": 24, "lo')
    page = made(tmp_path, run)
    assert page.row()["steps"] == "23 of 40"
    assert page.notes == ["run: the last line is not whole: the run goes on, or was killed"]


def test_a_whole_last_line_without_its_end_may_be_half_a_number(tmp_path: Path) -> None:
    page = made(tmp_path, write(tmp_path / "run", history(5), end=json.dumps(step(6))))
    assert page.row()["steps"] == "5 of 40" and len(page.notes) == 1


def test_a_run_that_was_resumed(tmp_path: Path) -> None:
    """The later lines count, even if the earlier ones were not removed."""
    again = [step(number, loss=0.25) for number in range(21, 31)]
    run = write(tmp_path / "run", [*history(27), *again, shown(30, speed=3000.0)])
    page = made(tmp_path, run)
    row = page.row()
    assert row["steps"] == "30 of 40" and row["best loss (at step)"] == "0.2500 (21)"
    assert page.notes == ["run: goes back to an earlier step, where the later lines count: 1 times"]


def test_a_run_that_lost_its_numbers(tmp_path: Path) -> None:
    lost = [step(number, loss=math.nan, grad_norm=math.inf) for number in range(31, 36)]
    page = made(tmp_path, write(tmp_path / "run", [*history(30), *lost]))
    assert page.row()["last loss"] == "1.1667"  # step 30's
    assert page.row()["best loss (at step)"] == "1.1667 (30)"
    assert page.notes == ["run: the loss is not a finite number in 5 steps, the first of them 31"]
    assert len(page.images) == 5


def test_a_run_that_had_no_number_at_all(tmp_path: Path) -> None:
    lost = [step(number, loss=None, grad_norm=math.nan) for number in (1, 2)]
    page = made(tmp_path, write(tmp_path / "run", lost))
    assert list(page.images) == ["learning rate"]
    assert not {"last loss", "best loss (at step)", "median tokens/s a device"} & set(page.row())


@pytest.mark.parametrize("over", ["steps", "tokens", "time"])
def test_evaluations_and_the_share_of_the_peak(tmp_path: Path, over: str) -> None:
    lines = [*history(10), evaluation(10, 1.75), *history(20)[11:], shown(20, mfu=0.4)]
    page = made(tmp_path, write(tmp_path / "run", [*lines, evaluation(20, 1.5)]), "--over", over)
    assert page.row()["last evaluation"] == "1.5000" and page.notes == []
    assert "evaluation loss" in page.images
    assert "model FLOPs utilization (MFU)" in page.images


def test_what_a_run_undid_is_gone_in_every_kind_of_line(tmp_path: Path) -> None:
    undone = [shown(30, speed=9000.0), evaluation(30, 0.5)]
    run = write(tmp_path / "run", [*history(27), *undone, step(21), step(22)])
    row = made(tmp_path, run).row()
    assert "last evaluation" not in row and row["median tokens/s a device"] == "1,000"


def test_lines_that_are_none_and_lines_of_other_kinds(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [])
    good = [json.dumps(line) for line in history(12)]
    bad = ["", "[1]", "{", '{"step": 3}', json.dumps(step(13, loss="low")), '{"kind": "step"}']
    bad += [
        json.dumps(step(1, step=0)),
        json.dumps(step(14, loss=True)),
        json.dumps(step(14, loss=10**400)),
        '"\\ud800',
    ]
    other = json.dumps({"kind": "another", "step": 5, "loss": 1.0})
    (run / "metrics.jsonl").write_text("\n".join([*good[:5], *bad, other, *good[5:], ""]))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    page = made(tmp_path, run)
    assert page.row()["steps"] == "12 of 40"
    assert page.notes == ["run: lines of metrics.jsonl that cannot be read, and are left out: 11"]


def test_a_run_without_steps_beside_one_that_has_some(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty", [])
    young = write(tmp_path / "young", [])
    (young / "metrics.jsonl").unlink()
    page = made(tmp_path, empty, write(tmp_path / "run", history(3)), young)
    assert [page.row(i)["steps"] for i in range(3)] == ["0 of 40", "3 of 40", "0 of 40"]
    assert page.notes == [f"{name}: has not reported a step yet" for name in ("empty", "young")]
    done = report(empty, young, "-o", tmp_path / "none")
    assert done.returncode == 2 and not (tmp_path / "none").exists()
    assert done.stderr == (
        f"error: there is nothing to draw yet: {empty}, {young} have no whole line about a step\n"
    )


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"config": 3, "world_size": 1}'])
def test_settings_that_are_not_there(tmp_path: Path, content: str | None) -> None:
    run = write(tmp_path / "run", history(3))
    (run / "config.json").unlink()
    if content is not None:
        (run / "config.json").write_text(content)
    page = made(tmp_path, run)
    what = "is missing" if content is None else "cannot be read"
    assert page.notes == [f"run: config.json {what}"]
    assert page.row()["steps"] == "3" and len(page.tables) == 1


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["_a", "<b>&", "$x^$", "x" * 200, "\u00fc"]
    page = made(tmp_path, *(write(tmp_path / name, history(12)) for name in names))
    assert [page.row(i)["run"] for i in range(5)] == names


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """As in a folder from another system; the record of a run may have such names, too."""
    lines = [*history(12), {**evaluation(12, 1.5), "label": "\udcff"}]
    facts = {"image": {"file": "/caf\udce9.sqsh"}}
    run = write(tmp_path / "caf\udce9", lines, facts=facts)
    out = tmp_path / "out\udcff"
    done = report(run, "-o", out, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/out\\udcff/report.html\n"
    page = Page(out)
    assert page.row()["run"] == "caf\ufffd"
    assert page.row()["last evaluation"] == "\ufffd 1.5000"
    assert page.row()["image"] == "/caf\ufffd.sqsh"


def test_a_number_of_ranks_that_is_none(tmp_path: Path) -> None:
    """It is requested if reports contain the steps' speed but not their duration."""
    page = made(tmp_path, write(tmp_path / "run", history(12), world_size=0))
    assert page.row()["steps"] == "12 of 40"


def test_many_runs_and_long_ones(tmp_path: Path) -> None:
    runs = [write(tmp_path / f"run{i}", history(5)) for i in range(12)]
    page = made(tmp_path, *runs, write(tmp_path / "long", history(5000)))
    assert page.row(12)["tokens"] == "500,000"
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 2_000_000


def test_thinning_keeps_the_mean_and_the_range() -> None:
    thin = blocks([1.0, 2, 3, 4, 5], [4.0, 2.0, math.nan, math.inf, 7.0], most=3)
    assert thin[0] == (1.5, 3.0, 2.0, 4.0) and thin[2] == (5.0, 7.0, 7.0, 7.0)
    assert thin[1][0] == 3.5 and all(math.isnan(value) for value in thin[1][1:])
    assert blocks([], []) == []


def test_a_report_is_made_again_over_the_old_one(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(3))
    assert made(tmp_path, run).row()["steps"] == "3 of 40"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(4)) + "\n")
    assert made(tmp_path, run).row()["steps"] == "4 of 40"


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(3))
    (tmp_path / "bare").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    long, loop = tmp_path / ("x" * 300), tmp_path / "loop"
    done = report(
        *(tmp_path / "none", long, loop, run, tmp_path / "bare", run / "config.json"),
        *(f"{run}/.", "-o", tmp_path),
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: 6 faults",
        f"  - {tmp_path}/none: does not exist",
        f"  - {long}: cannot be read: File name too long",
        f"  - {loop}: does not exist",
        f"  - {tmp_path}/bare: has no metrics.jsonl; a run's folder is the one it saves to",
        f"  - {run}/config.json: is not a folder",
        f"  - {run}: was given twice",
    ]


def test_requests_that_are_wrong(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(3))
    for arguments, said in (
        ((run,), "the following arguments are required: -o/--output"),
        (("-o", tmp_path), "the following arguments are required: RUN"),
        ((run, "-o", run / "config.json"), f"--output: {run}/config.json is not a folder"),
        ((run, "-o", tmp_path, "--over", "hours"), "argument --over: invalid choice: 'hours'"),
    ):
        done = report(*arguments)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {said}"), done.stderr
    for place in (run / "config.json" / "below", run / ("x" * 300)):
        done = report(run, "-o", place)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"{place} cannot be written: " in done.stderr


def test_a_line_that_cannot_be_written(tmp_path: Path) -> None:
    """The page is still written, and the exit code says that something is wrong."""
    run = write(tmp_path / "run", history(3))
    with Path("/dev/full").open("w") as full:
        done = report(run, "-o", tmp_path / "out", to=full)
    said = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert (tmp_path / "out" / "report.html").is_file()


def test_without_matplotlib(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(3))
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "matplotlib.py").write_text("raise ImportError('not here')")
    done = report(run, "-o", tmp_path / "out", PYTHONPATH=f"{tmp_path}/hide:{ROOT}")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr == (
        "error: the pictures are drawn by the library matplotlib, which is not installed; "
        "fix: pip install matplotlib\n"
    )


def test_torch_is_not_needed(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(3))
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "torch.py").write_text("raise ImportError('not here')")
    done = report(run, "-o", tmp_path / "out", PYTHONPATH=f"{tmp_path}/hide:{ROOT}")
    assert done.returncode == 0, done.stderr


def test_a_real_run_that_was_resumed(tmp_path: Path) -> None:
    data, run = write_text(tmp_path / "text"), tmp_path / "run"
    train(run, data, 0, 2, 3, "--report_interval=2")
    losses = train(run, data, 0, 2, 6, "--report_interval=2")
    page = made(tmp_path, run)
    row = page.row()
    assert row["steps"] == "6 of 6" and row["tokens"] == f"{6 * 2 * 17}" and page.notes == []
    assert row["last loss"] == f"{losses[-1]:.4f}" and row["best loss (at step)"]
    assert "torch 2." in row["versions"]
    assert row["model"] == "mamba-tiny (mamba), 266,112 parameters"
    assert row["global batch"] == "2 sequences, 34 tokens a step"
    assert row["learning rate"] == "0.003 at the peak, quadratic-cosine"
    assert row["image"] == "none of this project" and row["ranks"] == "1"
    assert re.fullmatch(r"2, [\d.e-]+ s each \(median\); training waited .* s in all", row["saves"])
    assert {"time of a step", "time of a save", "waiting for data"} < set(page.images)
    assert page.settings()["optim.learning_rate"] == ["0.003"]
