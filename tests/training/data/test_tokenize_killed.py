"""Tokenizing that is killed resumes to the same bytes, and never with another request's work."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.processes import descendants
from tests.training.support.runs import ROOT, wait_for
from tests.training.support.tokenizing import (
    SOURCE,
    command,
    make,
    remove_as_nfs_does,
    run,
    write_jsonl,
    write_set,
    write_txt,
)
from tests.training.support.tokenizing import place_fixture as place_fixture
from training.data.pack import pack
from training.data.tokenize import work
from training.errors import RequestError


def shards_done(work: Path, least: int) -> bool:
    return (work / "journal.json").exists() and len(list(work.glob("*.tokens"))) >= least


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.processes
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(place: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_txt(tmp_path / "data", [path.read_text() for path in SOURCE[:100]])
    alone = make(place, tmp_path / "data", tmp_path / "alone", "--seq_len=256")
    target, work = tmp_path / "set", tmp_path / ".set.tokenizing"
    flags = (f"--dataset={tmp_path}/data", f"--save_path={target}", "--seq_len=256")
    draw = random.Random()
    for moment in (0, 2, 6):  # completed shards
        argv = command(place, *flags, f"--num_proc={draw.choice((1, 2))}")
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, text=True)
        wait_for(partial(shards_done, work, moment), process)
        time.sleep(draw.random() / 5)
        below = descendants(process.pid)
        process.kill()
        process.wait()
        end = time.monotonic() + 120
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            assert time.monotonic() < end, "processes are left"
            time.sleep(0.05)
    if not target.exists():
        done = run(place, *flags, "--num_proc=2")
        assert done.returncode == 0, done.stderr
        assert "going on: " in done.stdout
    assert contents(target) == contents(alone)
    assert not work.exists()


@pytest.mark.processes
def test_a_worker_that_is_killed_as_it_begins_is_reported(place: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_txt(tmp_path / "data", [path.read_text() for path in SOURCE[:40]])
    flags = (f"--dataset={tmp_path}/data", f"--save_path={tmp_path}/set", "--seq_len=512")
    argv = command(place, *flags)
    process = subprocess.Popen([*argv, "--num_proc=2"], cwd=ROOT, stderr=-1, text=True)

    def workers() -> list[int]:
        lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(process.pid)}
        return [pid for pid, line in lines.items() if "spawn_main" in line.read_text()]

    assert wait_for(workers, process)
    os.kill(workers()[0], signal.SIGKILL)
    _, shown = process.communicate(timeout=300)
    assert process.returncode == 1
    assert shown.count("\n") == 1 and "a process of --num_proc was killed" in shown, shown


def test_killed_between_its_last_steps(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 100)
    made = make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=16")
    (tmp_path / ".set.tokenizing").mkdir()
    (tmp_path / ".set.tokenizing" / "placed").touch()
    make(place, f"{tmp_path}/a.txt", made, "--seq_len=16")
    assert not (tmp_path / ".set.tokenizing").exists()


def test_work_that_cannot_be_removed_is_a_warning_each_time(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 100)
    made = make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=16")
    (tmp_path / ".set.tokenizing" / "somebody's").mkdir(parents=True)
    (tmp_path / ".set.tokenizing" / "placed").touch()
    for _ in range(2):
        make(place, f"{tmp_path}/a.txt", made, "--seq_len=16")
        shown = capsys.readouterr()
        assert f"{made} is complete" in shown.out
        assert f"warning: {tmp_path}/.set.tokenizing cannot be removed: " in shown.err


def test_on_nfs_nothing_is_left_of_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 100)
    remove_as_nfs_does(monkeypatch)
    with pytest.raises(RequestError, match=r"seq_len: 9,999 is more than the [\d,]+ tokens"):
        make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=9999")
    make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=16")
    given = (f"--dataset={tmp_path}/a.txt", f"--tokenizer={place}/bpe", "--num_proc=1")
    pack([*given, f"--save_path={tmp_path}/packed.npy"])
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["a.txt", "packed.npy", "packed.npy.size", "set"]


def test_a_set_has_no_half_files_of_a_run_that_was_killed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 100)
    alone = make(place, f"{tmp_path}/a.txt", tmp_path / "alone", "--seq_len=16")
    begin(place, f"{tmp_path}/a.txt", tmp_path / "set")
    begun = tmp_path / ".set.tokenizing" / "set"
    begun.mkdir()
    (begun / "data-00000-of-00001.arrow.4711.half").write_bytes(b"half of it")
    made = make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=16")
    assert contents(made) == contents(alone)


@pytest.mark.processes
def test_a_full_disk_and_begun_work_of_another_request(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 10_000)
    flags = (f"--dataset={tmp_path}/a.txt", f"--save_path={tmp_path}/set", "--num_proc=1")
    full = run(place, *flags, "--seq_len=16", limit=20_000)
    assert full.returncode == 1 and full.stderr.count("\n") == 1
    assert "error: the cache of datasets cannot be written: File too large" in full.stderr
    make(place, f"{tmp_path}/a.txt", tmp_path / "first", "--seq_len=16")
    with monkeypatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
        full = run(place, *flags, "--seq_len=16", limit=20_000)
    assert full.returncode == 1 and full.stderr.count("\n") == 1
    assert ".tokens cannot be written: File too large" in full.stderr
    again = run(place, *flags, "--seq_len=32")
    assert again.returncode == 2
    assert "unfinished work of another request (different: seq_len)" in again.stderr
    assert run(place, *flags, "--seq_len=16").returncode == 0


@pytest.mark.parametrize("write", [write_jsonl, write_set])
def test_begun_work_does_not_go_on_with_other_texts_of_the_same_lengths(
    place: Path, tmp_path: Path, write: Callable[[Path, list[str]], object]
) -> None:
    texts = ["Some Words " * 100] * 9
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data", texts)
    begin(place, data, tmp_path / "set")
    write(tmp_path / "data", [text.lower() for text in texts])
    with pytest.raises(
        RequestError, match=r"unfinished work of another request \(different: content\)"
    ):
        make(place, data, tmp_path / "set", "--seq_len=16")


def test_begun_work_does_not_go_on_with_another_column_or_end_of_text(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one word", "body": "two more"}\n' * 99)
    shutil.copytree(place / "bpe", tmp_path / "bpe")
    data = tmp_path / "a.jsonl"
    begin(tmp_path, data, tmp_path / "set")
    with pytest.raises(RequestError, match=r"another request \(different: text_column, content\)"):
        make(tmp_path, data, tmp_path / "set", "--seq_len=16", "--text_column=body")
    (tmp_path / "bpe" / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    with pytest.raises(RequestError, match=r"another request \(different: eos\)"):
        make(tmp_path, data, tmp_path / "set", "--seq_len=16")


def begin(place: Path, data: object, target: Path) -> None:
    """Make a set as far as a run that was killed after its last shard."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(work, "_assemble", killed)
        make(place, data, target, "--seq_len=16")
