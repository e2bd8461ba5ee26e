"""The ranks of a run: whatever one of them does, and however long, the others wait for it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from tests.training.support.long_work import LIMIT, WORK
from tests.training.support.runs import run, write_text
from training import process_group
from training.errors import RequestError

pytestmark = pytest.mark.processes

PROGRAM = ("-m", "tests.training.support.long_work")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_may_take_longer_than_a_collective_call(rank: int) -> None:
    assert WORK > LIMIT
    done = run(2, str(rank), "works", program=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("goes on") == 2


def test_a_process_may_end_right_after_a_collective_call() -> None:
    """Each thread eventually runs, on one processor and with a lock that nobody yields."""
    done = run(2, program=("-m", "tests.training.support.last_call"))
    assert done.returncode == 0, done.stderr


def test_a_rank_that_dies_while_it_copies_ends_the_others() -> None:
    since = time.monotonic()
    done = run(2, "1", "dies", program=PROGRAM)
    assert done.returncode != 0 and "goes on" not in done.stdout
    assert time.monotonic() - since < 300


HSDP = ("sharding_strategy=hsdp", "shard_group_size=2")
FSDP2 = (
    HSDP,
    ("sharding_strategy=ddp", "tensor_parallel=2"),
    ("context_parallel=2",),
    ("tensor_parallel=2", "context_parallel=2"),
    ("async_checkpoint=True",),
    ("backend=neuron", "tensor_parallel=2"),
)


@pytest.mark.parametrize(
    "changes",
    [
        ("fsdp_engine=fsdp1", *HSDP),
        *(pytest.param(changes, marks=pytest.mark.fsdp2) for changes in FSDP2),
    ],
    ids=" ".join,
)
def test_calls_of_every_group_may_take_longer_than_the_watch_waits(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"data: {{dataset_path: '{write_text(tmp_path / 'text')}', seq_length: 16}}\n"
        "model: {family: mamba2, d_model: 64, n_layer: 2, vocab_size: 256, n_groups: 2}\n"
        f"run: {{num_steps: 1, hang_abort_seconds: 3600, save_ckpt_path: {tmp_path}/run}}\n"
    )
    program = ("-m", "tests.training.support.group_timeouts")
    done = run(4, "--config", str(file), *changes, program=program)
    assert done.returncode == 0, done.stderr
    shown = [line.split(", ") for line in re.findall(r"timeouts: \[([^]]*)\]", done.stdout)]
    assert len(shown) == 4, done.stdout
    for timeouts in shown:
        assert len(timeouts) > 1 and set(timeouts) == {"7200.0"}, shown


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("local_rank", "gpus"), [(1, 1), (7, 4)])
def test_a_rank_without_a_gpu_beside_ranks_that_have_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, local_rank: int, gpus: int
) -> None:
    """It would use gloo, and wait for ranks that use NCCL."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = (
        rf"^device: .*{device}.* local rank {local_rank} has no GPU \({gpus} visible\); fix: start"
    )
    with pytest.raises(RequestError, match=found) as refused:
        process_group.start(device)
    assert refused.value.local


def test_a_launcher_may_show_each_rank_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA_VISIBLE_DEVICES, each is local rank 0, whatever the node's number of ranks."""
    chosen: list[torch.device] = []

    def choose(device: torch.device) -> None:
        chosen.append(device)
        raise InterruptedError  # there is none here

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(InterruptedError):
        process_group.start("auto")
    assert chosen == [torch.device("cuda", 0)]
