"""A restart in place reads the newest checkpoint from memory, with real training and torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.slurm_config import free_ports
from tests.training.job.test_restart import STEPS, job, last_step, ranks, records
from tests.training.support.runs import (
    ROOT,
    TINY,
    kill_tree,
    losses,
    train,
    wait_for,
    write_text,
)
from training.checkpoint.memory_folder import PREFIX

pytestmark = pytest.mark.processes

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("undisturbed") / "save", data, 2, 2, STEPS)


def kept() -> list[Path]:
    """What jobs called 4242 keep in this machine's memory."""
    return list(MEMORY.glob(f"{PREFIX}4242.0-*"))


def test_a_killed_rank_and_its_neighbour_go_on_from_memory(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    save = tmp_path / "save"
    with job(save, data, "--checkpoint_in_memory=True") as process:
        assert wait_for(lambda: last_step(save) >= 10, process, 120)
        [folder] = kept()
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(ranks(process.pid)[1], signal.SIGKILL)
        assert wait_for(lambda: len(records(save, "training")) == 2, process, 120)
        assert process.wait(300) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    print(said)
    assert losses(save) == undisturbed
    assert not kept()
