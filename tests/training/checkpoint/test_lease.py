"""One run per folder: a second one is refused; a dead one's folder is taken over by exactly one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import (
    ROOT,
    TINY,
    kill_tree,
    losses,
    run,
    started,
    wait_for,
    write_text,
)
from training.checkpoint import lease
from training.checkpoint.lease import LEASE_FILE, LeaseOwner, OwnLease
from training.errors import RequestError, TrainingError

pytestmark = pytest.mark.processes

HOLD = """
import sys, time
from pathlib import Path
from training.checkpoint import lease
from training.errors import TrainingError
lease.BEAT, lease.SILENCE = 0.3, 2.0
try:
    with lease.OwnLease(Path(sys.argv[1])) as held:
        held.take(lambda reported: print("shown", reported, flush=True))
        print("has it", flush=True)
        while not held.lost and not Path(sys.argv[1], "end").exists():
            time.sleep(0.05)
        print("lost" if held.lost else "kept", held.lost, flush=True)
except TrainingError as error:
    print("refused", error, flush=True)
"""


@contextmanager
def holding(folder: Path, count: int = 1, *before: str, **env: str) -> Iterator[list[Any]]:
    """Start processes that all want a folder at once; `before` enters namespaces."""
    argv = [*before, sys.executable, "-c", HOLD, str(folder)]
    slurmless = {name: one for name, one in os.environ.items() if not name.startswith("SLURM_")}
    processes = [
        subprocess.Popen(
            argv,
            env={**slurmless, "PYTHONPATH": str(ROOT), **env},
            text=True,
            stdout=subprocess.PIPE,
        )
        for _ in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            kill_tree(process)
            process.communicate()


def said(process: subprocess.Popen[str], until: str) -> str:
    """Read a process's output up to a line that begins with `until`."""
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if line.startswith(until):
            return lines
    raise AssertionError(f"it never said {until!r} but: {lines}")


def left(folder: Path, **other: Any) -> LeaseOwner:
    """Leave the lease of a process that seems dead from here, or is elsewhere."""
    with subprocess.Popen(["true"]) as gone:
        pass
    holder = LeaseOwner(**{**vars(LeaseOwner.here()), "id": "old", "pid": gone.pid, **other})
    folder.mkdir(exist_ok=True)
    os.close(lease.make_lease(folder / LEASE_FILE, holder))
    return holder


def take(folder: Path, tell: Any) -> OwnLease:
    own = OwnLease(folder)
    own.take(tell)
    return own


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT", 0.2)
    monkeypatch.setattr(lease, "SILENCE", 1.0)


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    data, save = write_text(tmp_path / "text"), tmp_path / "save"
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--report_interval=1")
    with started(2, *flags, "--num_steps=100000", "--checkpoint_interval=20") as first:
        assert wait_for(lambda: (save / "metrics.jsonl").exists() and losses(save), first)
        held = json.loads((save / LEASE_FILE).read_text().splitlines()[0])
        stray = save / "checkpoints" / "step_99999999_ckp.tmp"
        stray.mkdir()  # like the first run's: a starting run removes incomplete ones
        begun = time.monotonic()
        second = run(2, *flags)
        assert time.monotonic() - begun < 30
        assert "exitcode  : 2" in second.stderr and "Traceback (most recent" not in second.stdout
        shown = (
            f"error: rank 0: save_ckpt_path: {save} is in use by a run, process {held['pid']} on "
        )
        assert second.stderr.count(shown) == 1
        assert f"end it (kill {held['pid']} on {held['host']})" in second.stderr
        assert stray.exists()
        done = len(losses(save))
        assert wait_for(lambda: len(losses(save)) > done, first), "the first was disturbed"
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=300)
    assert not (save / LEASE_FILE).exists()


@pytest.mark.parametrize("background", [True, False])
def test_a_run_whose_claim_is_lost_writes_no_checkpoint(tmp_path: Path, background: bool) -> None:
    """Two ranks; somebody else has taken the folder over, and their files are not touched."""
    data, save = write_text(tmp_path / "text"), tmp_path / "save"
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--report_interval=1")
    more = ("--num_steps=100000", f"--async_checkpoint={background}", "--checkpoint_interval=5")
    with started(2, *flags, *more) as process:
        assert wait_for(lambda: list(save.glob("checkpoints/step_*_ckp")), process)
        left(tmp_path / "other", host="other-host", job="8")
        # Atomically, as the run checks whether it still has its lease.
        (tmp_path / "other" / LEASE_FILE).replace(save / LEASE_FILE)
        there = {path.name for path in (save / "checkpoints").glob("step_*_ckp")}
        _, err = process.communicate(timeout=300)
    after = {path.name for path in (save / "checkpoints").glob("step_*_ckp")}
    assert len(after - there) <= 1, "one was about to be given its name"
    assert err.count("error: ") == 1 and "exitcode  : 1" in err
    assert f"{save} was taken over by job 8 (restart 0), process" in err
    assert json.loads((save / LEASE_FILE).read_text().splitlines()[0])["job"] == "8"


def test_many_starters_one_winner(tmp_path: Path) -> None:
    """In an empty folder, in one left by a dead run of another host, and with a torn lease."""
    for round_, leave in enumerate(
        (
            lambda folder: None,
            lambda folder: left(folder, boot="another"),
            lambda folder: (folder.mkdir(), (folder / LEASE_FILE).write_text('{"id": "ab')),
        )
    ):
        folder = tmp_path / str(round_)
        leave(folder)
        with holding(folder, 8) as processes:
            time.sleep(6)  # longer than a lease is watched; late starters watch it too
            (folder / "end").touch()
            texts = [process.communicate(timeout=300)[0] for process in processes]
        ends = [text.splitlines()[-1].split()[0] for text in texts]
        assert sorted(ends) == ["kept", *["refused"] * 7], "\n".join(texts)
        assert [path.name for path in folder.iterdir()] == ["end"]


def test_a_dead_process_of_this_host_is_followed_at_once(tmp_path: Path) -> None:
    with holding(tmp_path / "save") as (first,):
        said(first, "has it")
        first.kill()
        first.wait()
        shown: list[str] = []
        begun = time.monotonic()
        with take(tmp_path / "save", shown.append):
            assert time.monotonic() - begun < 10
    assert len(shown) == 1 and shown[0].endswith(": that process is dead")
    assert f"process {first.pid} on" in shown[0]


def test_what_cannot_be_seen_from_here_is_watched(tmp_path: Path, quick: None) -> None:
    """On another host, or in a container with its own process numbers, no statement is trusted."""
    for number, other in enumerate(({"boot": "another"}, {"namespace": "another"})):
        shown: list[str] = []
        left(tmp_path / str(number), **other)
        begun = time.monotonic()
        with take(tmp_path / str(number), shown.append):
            assert time.monotonic() - begun > 1
        assert "it has given no sign of life for 1 s" in shown[-1]


def test_a_live_container_with_this_host_name_is_not_taken_for_dead(
    tmp_path: Path, quick: None
) -> None:
    """Its process has number 1 or 2 in the container, which is another process here."""
    enter = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with holding(tmp_path / "save", 1, *enter) as (inside,):
        said(inside, "has it")
        with pytest.raises(RequestError, match=r"is in use by a run, process \d+ on"):
            take(tmp_path / "save", print)


def test_a_requeued_job_follows_its_earlier_start_even_if_that_lives(tmp_path: Path) -> None:
    """As if a node had lost Slurm but not the shared disk; another job would be refused."""
    folder = tmp_path / "save"
    with holding(folder, SLURM_JOB_ID="7") as (first,):
        said(first, "has it")
        with holding(folder, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="3") as (other,):
            assert "in use by job 7 (restart 0)" in said(other, "refused")
        with holding(folder, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1") as (again,):
            assert "Slurm has started that job again, as this one" in said(again, "has it")
            assert "taken over by job 7 (restart 1)" in said(first, "lost")
            (folder / "end").touch()
            assert said(again, "kept")


def test_a_node_that_takes_the_place_of_another_follows_it_at_once(tmp_path: Path) -> None:
    """The process there may live: its node is cut off from the others, but not from the disk."""
    folder = tmp_path / "save"
    with holding(folder, SLURM_JOB_ID="7") as (first,):
        said(first, "has it")
        begun = time.monotonic()
        with holding(folder, SLURM_JOB_ID="7", RESTART_ROUND="1") as (next_one,):
            assert "the job goes on without the node of that process" in said(next_one, "has it")
            assert time.monotonic() - begun < 60
            assert "taken over by job 7 (restart 0)" in said(first, "lost")
            with holding(folder, SLURM_JOB_ID="7", RESTART_ROUND="1") as (same,):
                assert "in use by job 7 (restart 0)" in said(same, "refused")
            (folder / "end").touch()
            assert said(next_one, "kept")


def test_a_claim_that_is_gone_is_lost(tmp_path: Path) -> None:
    with take(tmp_path, print) as held:
        held.check()
        (tmp_path / LEASE_FILE).unlink()
        with pytest.raises(TrainingError, match=r"has lost its \.running; this run ends before"):
            held.check()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"save_ckpt_path: .*/file/save cannot be"):
        take(tmp_path / "file" / "save", print)
