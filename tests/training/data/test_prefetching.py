"""Reading ahead changes no batch and no checkpoint; workers end with their run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.processes import descendants
from tests.training.data.test_stream import config, feed, write
from tests.training.support.runs import COLD, TINY, run, started, steps, wait_for, write_text
from training.config.config import DataConfig
from training.data.base import DataFeed
from training.data.loader import Prefetcher
from training.data.packed import PackedWriter
from training.data.sources import open_feed
from training.errors import RequestError, TrainingError

CPU = torch.device("cpu")


@contextmanager
def ahead(
    plain: DataFeed, reopen: partial[DataFeed], workers: int, prefetch: int
) -> Iterator[Prefetcher]:
    one = Prefetcher(plain, reopen, workers=workers, prefetch=prefetch, device=CPU)
    try:
        yield one
    finally:
        one.close()


def of(path: str, batch: int = 3) -> partial[DataFeed]:
    data = DataConfig(
        dataset_path=path, seq_length=16, batch_size=batch, position_weighting="packed" in path
    )
    return partial(open_feed, config(data), 0, 1)


@pytest.mark.parametrize(
    ("workers", "prefetch"),
    [
        (0, 0),
        (0, 2),
        pytest.param(1, 1, marks=pytest.mark.processes),
        pytest.param(2, 2, marks=pytest.mark.processes),
    ],
)
def test_batches_and_checkpoints_are_those_of_reading_in_turn(
    tmp_path: Path, workers: int, prefetch: int
) -> None:
    with PackedWriter(tmp_path / "packed.npy") as file:
        for length in range(1, 80):
            file.write([length] * length)
    stream = partial(feed, write(tmp_path / "texts", 5), batch=3)
    for reopen in (stream, of(f"packed:{tmp_path}/packed.npy")):
        alone = reopen()
        for _ in range(2):
            alone.next_rows(range(3))
        place = alone.state(lambda mine: [mine])
        begun = reopen()
        with ahead(begun, reopen, workers, prefetch) as one:
            assert one.resume(place) is None
            for _ in range(5):
                expected, batch = alone.next_rows(range(3)).rows, one.next_batch()
                assert torch.equal(batch.inputs, expected.inputs)
                assert torch.equal(batch.targets, expected.targets)
                if expected.weights is not None:
                    assert batch.weights is not None
                    assert torch.equal(batch.weights, expected.weights)
                assert batch.seq_idx is not None and expected.seq_idx is not None
                assert torch.equal(batch.seq_idx, expected.seq_idx)
                assert one.state(lambda mine: [mine]) == alone.state(lambda mine: [mine])


@pytest.mark.processes
def test_a_worker_that_is_killed_ends_the_run_with_one_error(tmp_path: Path) -> None:
    reopen = of(write_text(tmp_path))
    before = set(descendants(os.getpid()))
    with ahead(reopen(), reopen, 2, 2) as one:
        one.next_batch()
        for pid in set(descendants(os.getpid())) - before:
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match="a process of num_workers was killed"):
            for _ in range(9):
                one.next_batch()


def test_more_workers_than_sequences_are_reported_and_none_ahead_is_refused(tmp_path: Path) -> None:
    reopen = of(write_text(tmp_path), batch=1)
    with ahead(reopen(), reopen, 4, 2) as one:
        assert one.notes == [
            "num_workers: 1 of 4 have something to read, as a rank's batch has 1 sequences"
        ]
    with pytest.raises(RequestError, match="prefetch: num_workers read ahead"):
        config(DataConfig(dataset_path="synthetic:", num_workers=1, prefetch=0))


@pytest.mark.processes
def test_runs_are_equal_to_the_bit_and_tell_how_long_they_waited(tmp_path: Path) -> None:
    path = write(tmp_path / "texts", 5)
    asked = (*TINY, f"--dataset_path={path}", "--tokenizer=bytes", "--num_steps=5")
    for name, more in (("thread", "--prefetch=0"), ("processes", "--num_workers=2")):
        save = f"--save_ckpt_path={tmp_path / name}"
        more_flags = (more, "--gradient_accumulation=2", "--report_interval=5")
        done = run(2, *asked, save, *more_flags, timeout=240)
        assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "thread") == steps(tmp_path / "processes")
    assert '"data_wait": 0.' in (tmp_path / "thread" / "metrics.jsonl").read_text()


@pytest.mark.processes
def test_workers_end_with_a_run_that_is_asked_to_stop_or_killed(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text")
    asked = (*TINY, f"--dataset_path={path}", "--num_workers=1", "--num_steps=1000000")
    for number in (signal.SIGTERM, signal.SIGKILL):
        save = tmp_path / number.name
        flags = (*asked, f"--save_ckpt_path={save}", "--report_interval=1")
        with started(0, *flags, python=COLD) as process:
            assert wait_for((save / "metrics.jsonl").exists, process)
            wait_for(lambda save=save: steps(save), process)  # type: ignore[misc]
            below = descendants(process.pid)
            assert below
            # As a scheduler does, signal all processes of the job.
            for pid in (*below, process.pid) if number == signal.SIGTERM else (process.pid,):
                os.kill(pid, number)
            process.communicate(timeout=300)
            assert process.returncode == (85 if number == signal.SIGTERM else -9)
        end = time.monotonic() + 120
        while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < end:
            time.sleep(0.05)
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
