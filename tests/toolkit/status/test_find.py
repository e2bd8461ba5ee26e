"""`sqshforge status`: choosing a run, all runs, and watching."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from sqshforge.cli.main import cli
from sqshforge.host.programs import Programs, Result
from sqshforge.status import find
from tests.support.command_line import SCRIPT, sqshforge
from tests.support.run_folders import HOUR, age, facts, history, noted, plan, write
from training.job import job_log

pytestmark = pytest.mark.processes


def test_all_runs_in_a_table(tmp_path: Path) -> None:
    old = write(tmp_path / "checkpoints/old", history(1000))
    age(old, 30 * HOUR)
    new = write(tmp_path / "checkpoints/deep/new", history(50))
    noted(new, None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"d_model": 64}')
    done = Programs().attempt(
        [sys.executable, "-m", "sqshforge", "status"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.code == 0, done.err
    head, *rows = [line.split() for line in done.out.splitlines() if line]
    assert head[:6] == ["run", "state", "job", "step", "of", "loss"]
    assert rows[0][:6] == ["checkpoints/deep/new", "running", "4242", "50", "1,000", "4.5000"]
    assert rows[1][:4] == ["checkpoints/old", "silent", "1,000", "1,000"]
    assert len(rows) == 3 and rows[2][0] == "next:"


def test_all_runs_for_programs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "run", history(5))
    env = {"SQSHFORGE_RUNS": f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/none"}
    shown = json.loads(sqshforge("status", "--json", env=env).out)
    assert [one["folder"] for one in shown["runs"]] == [f"{tmp_path}/{one}/run" for one in "ab"]


@pytest.mark.parametrize("what", ["4242", "run", "run/"])
def test_a_run_by_its_job_its_name_or_its_folder(tmp_path: Path, what: str) -> None:
    run = write(tmp_path / "run", history(5))
    noted(run, 0)
    named = f"{tmp_path}/{what}" if "/" in what else what
    assert facts(named, "--root", str(tmp_path))["folder"] == str(run)


def test_a_job_that_was_reported_to_save_elsewhere(tmp_path: Path) -> None:
    """The launcher's folder, where one looks for the job, is not the run's."""
    run, usual = write(tmp_path / "elsewhere/run", history(5)), tmp_path / "checkpoints/usual"
    job_log.begin(plan(run), {"CHECKPOINTS": str(usual)})
    for what in ("4242", usual, run):
        assert facts(str(what), "--root", str(tmp_path / "checkpoints"))["folder"] == str(run)
    shown = json.loads(sqshforge("status", "--json", "--root", tmp_path).out)
    assert [one["folder"] for one in shown["runs"]] == [str(run)]


def test_a_job_that_saves_beside_an_older_run(tmp_path: Path) -> None:
    """The launcher's folder has a run of its own, whose files are older than the job."""
    usual, run = write(tmp_path / "ckpt", history(999)), write(tmp_path / "new", history(7))
    age(usual, 72 * HOUR)
    job_log.begin(plan(run), {"CHECKPOINTS": str(usual)})
    shown = facts("4242", "--root", str(tmp_path))
    assert (shown["folder"], shown["progress"]["step"]) == (str(run), 7)
    old = facts(usual)
    assert (old["folder"], old["state"], old["jobs"]) == (str(usual), "silent", [])


def test_a_job_that_saves_beside_a_run_of_now(tmp_path: Path) -> None:
    usual, run = write(tmp_path / "usual", history(50)), write(tmp_path / "run", history(7))
    noted(usual, None, job="4300")
    job_log.begin(plan(run), {"CHECKPOINTS": str(usual)})
    write(usual, history(60))
    job_log.end(plan(run), {"CHECKPOINTS": str(usual)}, 2)
    shown = facts(usual)
    assert (shown["state"], [one["id"] for one in shown["jobs"]]) == ("running", ["4300"])
    assert facts(run)["state"] == "failed"


def test_a_copy_of_a_run_has_its_jobs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    noted(run, None)
    age(write(run, history(5)), -1, "metrics.jsonl")  # file times are coarser than the clock
    job_log.end(plan(run), {}, 0)
    copy = shutil.copytree(run, tmp_path / "copy")
    shown = facts(copy)
    assert (shown["folder"], shown["state"]) == (str(copy), "done")
    assert [one["id"] for one in shown["jobs"]] == ["4242"]


def test_a_job_before_the_last_one(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(5))
    noted(run, 1, 1, 1, 1, job="4242")
    age(run, 60, "jobs/4242.jsonl")
    noted(run, None, job="4300")
    done = sqshforge("status", "4242", "--root", tmp_path)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert any(
        line.startswith("job 4300, restart 0, 2 nodes of 4 processes: n1 n2") for line in lines
    )
    assert "before it 1 job: 4242" in lines
    shown = next(line for line in lines if line.startswith("job 4242 restart 3"))
    assert "exit code 1" in shown and shown.endswith("the run is now that of job 4300")


@pytest.mark.parametrize("what", ["4711", "no/such/run", "no-such-run"])
def test_an_unknown_run_or_job(tmp_path: Path, what: str) -> None:
    write(tmp_path / "run", history(5))
    done = sqshforge("status", what, "--root", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert f"there is no run and no job {what}" in done.err
    assert str(tmp_path) in done.err or "/" in what
    assert "fix:" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["{}"], "is not a run's folder"),
        (["--root", "{}"], "there are no runs"),
        (["--root", "{}/none"], "there are no runs"),
        (["{}/run", "--every", "3"], "--every has an effect only with --watch"),
        (["{}/run", "--watch", "--json"], "--json prints once"),
        (["{}/run", "--watch", "--every", "soon"], "--every"),
    ],
)
def test_a_wrong_request(tmp_path: Path, words: list[str], shown: str) -> None:
    done = sqshforge("status", *(word.format(tmp_path) for word in words))
    assert (done.code, done.out) == (2, "")
    assert shown in done.err and "Traceback" not in done.err


@contextlib.contextmanager
def shared() -> Iterator[Path]:
    """A folder with closed ones in it, visible to an ordinary user, unlike pytest's own ones."""
    with tempfile.TemporaryDirectory(prefix="sqshforge-test-") as name:
        Path(name).chmod(0o755)
        try:
            yield Path(name)
        finally:
            for folder, _, _ in os.walk(name):  # from the top: it opens closed folders on the way
                for one in os.scandir(folder):
                    if one.is_dir(follow_symlinks=False):
                        Path(one).chmod(0o700)


def by_another(*words: str | Path, **variables: str) -> Result:
    """Run `sqshforge status WORDS` as an ordinary user of this machine."""
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command = [sys.executable, "-m", "sqshforge", "status", *words]
    return Programs().attempt([*(user if os.getuid() == 0 else []), *command], env=variables)


def test_another_users_folders_are_passed_over() -> None:
    with shared() as place:
        write(place / "run", history(5))
        (write(place / "closed", history(5)) / "metrics.jsonl").chmod(0)
        write(place / "hidden", history(5)).chmod(0)
        done = by_another("--json", "--root", place)
    assert done.code == 0, done.err
    shown = {Path(one["folder"]).name: one["closed"] for one in json.loads(done.out)["runs"]}
    assert shown == {"closed": ["metrics.jsonl"], "run": []}


def test_a_job_is_found_beside_another_users_closed_folders() -> None:
    with shared() as place:
        other = write(place / "alice", history(5))
        for folder in (other / "jobs", other / "checkpoints" / "step_5_ckp"):
            folder.mkdir(parents=True)
            folder.chmod(0)
        noted(write(place / "bob", history(5)), None, job="77")
        one = by_another("77", "--root", place)
        every = by_another("--root", place)
    assert one.code == 0 and "bob" in one.out, one.err
    assert every.code == 0 and "alice" in every.out and "bob" in every.out, every.err


def test_links_that_cannot_be_followed_hide_no_run_beside_them() -> None:
    with shared() as place:
        (place / "closed" / "run").mkdir(parents=True)
        (place / "closed").chmod(0)
        for name, goal in (("to-closed", "closed/run"), ("loop", "loop"), ("gone", "no/where")):
            (place / "runs" / name).parent.mkdir(exist_ok=True)
            (place / "runs" / name).symlink_to(place / goal if "/" in goal else goal)
        write(place / "runs" / "run", history(5))
        done = by_another("--json", "--root", place / "runs")
    assert done.code == 0, done.err
    assert [Path(one["folder"]).name for one in json.loads(done.out)["runs"]] == ["run"]


@pytest.mark.parametrize("is_variable", [True, False])
@pytest.mark.parametrize("what", [[], ["run"], ["77"]])
def test_another_users_root_is_passed_over(what: list[str], is_variable: bool) -> None:
    with shared() as place:
        closed, opened = place / "closed", place / "open"
        closed.mkdir()
        closed.chmod(0)
        noted(write(opened / "run", history(5)), None, job="77")
        if is_variable:
            done = by_another(*what, SQSHFORGE_RUNS=f"{closed}:{opened}")
        else:
            done = by_another(*what, "--root", closed, "--root", opened)
    assert done.code == 0, done.err
    assert f"{opened}/run" in done.out


@pytest.mark.parametrize("what", [[], ["77"]])
def test_a_job_that_saves_to_another_users_closed_folder(what: list[str]) -> None:
    with shared() as place:
        run = write(place / "closed/run", history(5))
        job_log.begin(plan(run, job="77"), {"CHECKPOINTS": str(place / "runs/usual")})
        run.parent.chmod(0)
        done = by_another(*what, "--root", place / "runs")
    assert done.code == 0, done.err
    assert f"{place}/runs/usual" in done.out


def test_watching_on_a_terminal_until_the_end(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(5))
    noted(run, None)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sqshforge", "status", run, "--watch", "--every", "0.2"],
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(slave)
    seen = b""
    try:
        while b"running: lines come" not in seen:
            seen += os.read(master, 65536)
        write(run, history(7))
        while b"step         7 of" not in seen:
            seen += os.read(master, 65536)
        job_log.end(plan(run), {}, 0)
        with contextlib.suppress(OSError):  # how Linux reports a terminal's end
            while True:
                seen += os.read(master, 65536)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"done: its job has noted that it ended well" in seen


def test_a_run_that_is_removed_while_all_are_looked_at_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = (write(tmp_path / name, history(5)) for name in ("kept", "gone"))
    runs = find.runs

    def removed_meanwhile(below: Sequence[Path]) -> list[Path]:
        found = runs(below)
        shutil.rmtree(gone)
        return found

    monkeypatch.setattr(find, "runs", removed_meanwhile)
    shown = CliRunner().invoke(cli, ["status", "--root", str(tmp_path)])
    assert shown.exit_code == 0 and kept.name in shown.output and gone.name not in shown.output


def test_a_watched_run_that_is_removed_is_named(tmp_path: Path) -> None:
    run = write(tmp_path / "run", history(5))
    process = subprocess.Popen(
        [SCRIPT, "status", run, "--watch", "--every", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        shutil.rmtree(run)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "the run was removed while it was looked at" in err and str(run) in err


def test_watching_without_a_terminal(tmp_path: Path) -> None:
    """It prints a line for each change, and nothing otherwise."""
    run = write(tmp_path / "run", history(20))
    noted(run, None)
    command = [sys.executable, "-m", "sqshforge", "status", str(run), "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(0.5)
            job_log.end(plan(run), {}, 0)
            rest = process.stdout.read()
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()
    assert first.startswith(f"{run}: running | step 20 of 1,000 | loss 4.8000 | 4,096 tokens/s | ")
    assert rest == f"{run}: done | step 20 of 1,000 | loss 4.8000 | 4,096 tokens/s\n"
