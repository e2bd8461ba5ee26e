"""`sqshforge status` on folders in every state that a run can have."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from sqshforge.status import run as clock
from tests.support.command_line import sqshforge
from tests.support.run_folders import HOUR, age, facts, history, noted, report, step, write
from training.loggers.console import Console
from training.observers.hang_report import Answer, HangReporter, format_hang
from training.systems.composer.config import (
    ComposerConfig,
    DataSection,
    HeldOut,
    Part,
    SchedulerSection,
)


@pytest.mark.parametrize(
    ("codes", "state", "over", "why"),
    [
        ((None,), "running", False, "lines come"),
        ((0,), "done", True, "its job has noted that it ended well"),
        ((1,), "waiting", False, "exit code 1: it failed; its launcher requeues it, 3 times"),
        ((137,), "waiting", False, "exit code 137: killed by SIGKILL"),
        ((87,), "waiting", False, "exit code 87: a node is bad"),
        ((2,), "failed", True, "exit code 2: the request was wrong"),
        ((3,), "failed", True, "exit code 3: something is missing on a node"),
        ((85,), "saved", False, "its launcher requeues it"),
        ((85, 85, 85, 85, 85), "saved", False, "its launcher requeues it"),
        ((1, 1, 1, 86), "failed", True, "ranks hung, and it was ended; given up after 3 restarts"),
        ((1, 1, None), "running", False, "lines come"),
    ],
)
def test_the_exit_code_of_the_last_start_tells(
    tmp_path: Path, codes: tuple[int | None, ...], state: str, over: bool, why: str
) -> None:
    run = write(tmp_path / "run", history(50))
    noted(run, *codes)
    shown = facts(run)
    assert (shown["state"], shown["over"]) == (state, over)
    assert why in shown["why"]
    assert len(shown["jobs"][0]["starts"]) == len(codes)


def test_requeues_of_the_launcher_count(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(50))
    noted(run, 1, 1, environment={"REQUEUES": "1"})
    assert facts(run)["state"] == "failed"


@pytest.mark.parametrize(
    ("codes", "left"),
    [((85, 85, 1), "3 times"), ((85, 85, 1, 1), "2 times"), ((1, 1, 1), "1 time")],
)
def test_requeues_that_are_left(tmp_path: Path, codes: tuple[int, ...], left: str) -> None:
    """REQUEUES=3 does not include those that the launcher allows after time limits."""
    run = write(tmp_path / "run", history(50))
    noted(run, *codes, environment={"REQUEUES": f"{3 + codes.count(85)}"})
    assert facts(run)["why"].endswith(f"its launcher requeues it, {left} more at most")


def test_what_was_started_without_slurm_is_not_started_again(tmp_path: Path) -> None:
    for code, state in ((85, "saved"), (1, "failed")):
        run = write(tmp_path / state, history(50))
        noted(run, code, job="local")
        shown = facts(run)
        assert (shown["state"], shown["over"]) == (state, True)


@pytest.mark.processes
def test_a_run_without_jobs(tmp_path: Path) -> None:
    """Such runs date from before jobs had records, or come from an entry point alone."""
    run = write(tmp_path / "run", history(50))
    assert facts(run)["state"] == "running"
    age(run, 2 * HOUR)
    shown = facts(run)
    assert shown["state"] == "silent" and shown["why"] == "no job has noted how it ended"
    assert shown["seconds_left"] is None
    lines = sqshforge("status", run).out.splitlines()
    assert any("2 h 00 min since a file was written" in line for line in lines)


def test_a_run_that_goes_on_without_its_job(tmp_path: Path) -> None:
    """Somebody restarted it by hand, with something that records nothing."""
    run = write(tmp_path / "run", history(50))
    noted(run, 2)
    age(run, 600, "jobs/4242.jsonl")
    assert facts(run)["state"] == "running"


@pytest.mark.processes
@pytest.mark.parametrize("noted", ["", '{"kind": "sta'])
def test_a_run_of_which_only_a_job_is_there_that_notes_no_start(tmp_path: Path, noted: str) -> None:
    """A disk that was full when the job began leaves such a run."""
    run = tmp_path / "run"
    (run / "jobs").mkdir(parents=True)
    (run / "jobs/4242.jsonl").write_text(noted)
    assert facts(run)["state"] == "running"
    age(run, 2 * HOUR)
    assert facts(run)["state"] == "silent"
    lines = sqshforge("status", run).out.splitlines()
    assert any("2 h 00 min since a file was written" in line for line in lines)


def test_how_long_may_a_run_be_quiet(tmp_path: Path) -> None:
    """Four report intervals, and at least five minutes; before the first report, half an hour."""
    slow = [step(1), step(2), report(2, speed=1024 / 60)]  # a step per minute, ten per report
    for quiet, lines, state in (
        (240, history(50), "running"),
        (360, history(50), "silent"),
        (2000, slow, "running"),
        (2600, slow, "silent"),
    ):
        run = write(tmp_path / f"{quiet}", lines)
        age(run, quiet)
        assert facts(run)["state"] == state, quiet
    young = write(tmp_path / "young", [])
    (young / "metrics.jsonl").unlink()
    noted(young, None)
    for quiet, state in ((1500, "running"), (400, "silent")):
        age(young, quiet)
        shown = facts(young)
        assert shown["state"] == state and shown["progress"]["step"] == 0


def test_a_checkpoint_that_is_written_is_a_sign_of_life(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(50))
    age(run, 2 * HOUR)
    writing = run / "checkpoints/step_50_ckp.tmp"
    writing.mkdir(parents=True)
    (writing / "__0_0.distcp").write_bytes(bytes(1000))
    shown = facts(run)
    assert shown["state"] == "running" and "step_50_ckp.tmp" in shown["why"]


@pytest.mark.processes
def test_how_fast_and_how_long(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*history(90), step(91), report(91, speed=9.0)])
    shown = facts(run)
    far = shown["progress"]
    assert (far["step"], far["tokens_seen"]) == (91, 91 * 4096)
    assert far["tokens_per_second"] == 4096 and far["seconds_per_step"] == 1
    assert far["mfu"] == 0.25 and far["reports"] == 10
    assert 909 - 60 < shown["seconds_left"] <= 909
    assert far["trend"]["word"] == "falling" and far["trend"]["steps"] == 90
    assert shown["share"] == 0.091
    lines = [" ".join(line.split()) for line in sqshforge("status", run).out.splitlines()]
    assert "speed 1,024 tokens/s a device, 4,096 in all, MFU 25.0% (median of 10 reports)" in lines
    assert any(line.startswith("left 15 min ") and "at 1 s a step" in line for line in lines)


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([3.0] * 50, "level"),
        ([3.0 + at % 2 / 10 for at in range(50)], "level"),
        ([3.0 + at / 100 + at % 2 / 10 for at in range(50)], "rising"),
    ],
)
def test_how_the_loss_goes(tmp_path: Path, losses: list[float], word: str) -> None:
    run = write(tmp_path / "run", [step(1 + at, loss) for at, loss in enumerate(losses)])
    assert facts(run)["progress"]["trend"]["word"] == word


@pytest.mark.processes
def test_lines_that_are_none(tmp_path: Path) -> None:
    lost = {**step(51), "loss": None, "grad_norm": None, "skipped": True}
    run = write(tmp_path / "run", [*history(50), lost, step(52, math.nan)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\n[1]\n{"kind": "step"}\n"step"\n\xff step\n{"kind": "step", "step": true}\n')
    (run / "config.json").write_text("[]")
    shown = facts(run)
    far = shown["progress"]
    assert (far["step"], far["loss"], far["left_out"]) == (52, None, 1)
    assert shown["settings"]["num_steps"] is shown["share"] is shown["seconds_left"] is None
    assert sqshforge("status", run).code == 0


def test_a_file_of_gigabytes_is_read_from_its_end(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [], eval_dataset_path="text:*.txt")
    evaluation = {"kind": "evaluation", "step": 50, "loss": 3.5, "perplexity": 33.1, "tokens": 64}
    lines = [*history(50), evaluation, *history(8000)[60:]]
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(20 << 30)  # a sparse file, which takes no space
        file.seek(0, 2)
        file.write(b"\n" + "".join(json.dumps(line) + "\n" for line in lines).encode())
    begun = time.monotonic()
    shown = facts(run)["progress"]
    assert time.monotonic() - begun < 60
    assert shown["step"] == 8000 and shown["trend"]["steps"] == 1000
    assert [one["step"] for one in shown["evaluations"]] == [50]


@pytest.mark.processes
def test_a_hang_as_the_watch_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", history(50))
    tell = HangReporter(run, Console())
    places = {0: "backward", 1: "forward, block 1 of 2"}
    answers = {
        rank: Answer(step=51, number=2 - rank, place=place, idle=33.0, stacks="  loop.py:1 in f")
        for rank, place in places.items()
    }
    age(run, 10)
    tell.hang(format_hang(answers, {}))
    words = "rank 1 hangs in step 51, forward, block 1 of 2; no progress for 33 s"
    shown = facts(run)
    assert shown["hang"]["what"] == words and not shown["hang"]["over"]
    assert shown["why"] == words
    age(run, HOUR)
    assert (facts(run)["state"], facts(run)["why"]) == ("silent", words)
    tell.progress()
    assert facts(run)["hang"]["what"] == words and facts(run)["hang"]["over"]
    assert words in sqshforge("status", run).out


@pytest.mark.parametrize(
    ("length", "steps"),
    [("10068787200tok", 2743), ("1.5e8TOK", 41), ("274ba", 274), ("3e2ba", 300)],
)
def test_a_run_of_composer(tmp_path: Path, length: str, steps: int) -> None:
    part = Part(path="a.npy", weight=1.0)
    config = ComposerConfig(
        data=DataSection(
            text_paths=(part,),
            eval_paths=(HeldOut(path="b.npy", label="b"),),
            seq_len=4096,
            global_batch_size=896,
        ),
        scheduler=SchedulerSection(name="cosine", t_max=length, t_warmup="0ba"),
    )
    assert config.num_steps == steps
    run = write(tmp_path / "run", history(1))
    record = {"config": asdict(config), "world_size": 4}
    (run / "config.json").write_text(json.dumps(record))
    age(run, 120, "config.json")
    evaluations = [
        {"kind": "evaluation", "step": 2, "label": label, "loss": 3.0, "perplexity": 20.1}
        for label in ("a", "b")
    ]
    with (run / "metrics.jsonl").open("a") as file:
        for line in (step(2), report(2), *evaluations):
            file.write(json.dumps(line) + "\n")
    for number in (1, 2, 3):
        with zipfile.ZipFile(run / f"ep0-ba{number}-rank0.pt", "w") as file:
            file.writestr("data", bytes(1000))
    cut = run / "ep0-ba3-rank0.pt"
    cut.write_bytes(cut.read_bytes()[:500])
    (run / "latest-rank0.pt").symlink_to("ep0-ba2-rank0.pt")
    shown = facts(run)
    assert shown["settings"]["num_steps"] == steps and shown["state"] == "running"
    assert shown["settings"]["model"] == "mambaoutai"
    assert [one["label"] for one in shown["progress"]["evaluations"]] == ["a", "b"]
    kept = shown["checkpoints"]
    assert (kept["newest"]["step"], kept["count"], len(kept["broken"])) == (2, 2, 1)


def test_an_end_before_num_steps_is_explained(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(50), epochs=2)
    noted(run, 0)
    assert facts(run)["why"] == "it ended before step 1,000, as epochs=2 asked for"


@pytest.mark.processes
def test_a_login_node_whose_clock_is_off(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(50))
    code = (
        "import sys, time\nright = time.time\ntime.time = lambda: right() + 7200\n"
        "from sqshforge.cli.main import main\n"
        "sys.argv[1:] = ['status', sys.argv[1], '--json']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True)
    shown = json.loads(done.stdout)
    assert shown["state"] == "running" and shown["seconds_quiet"] < 60


def test_a_file_system_without_files_that_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", history(5))
    before = run.stat().st_mtime_ns
    monkeypatch.setattr(clock, "_unnamed", lambda folder: None)
    found = clock.Clock.of(run)
    assert found.whose == clock.THEIRS and abs(found.ahead) < 1
    assert run.stat().st_mtime_ns == before and [one.name for one in tmp_path.iterdir()] == ["run"]


def test_where_no_file_system_can_be_asked() -> None:
    assert clock.Clock.of(Path("/proc/self")) == clock.Clock(0.0, clock.OWN)
