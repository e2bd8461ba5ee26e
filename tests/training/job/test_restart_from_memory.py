"""A restart in place reads the newest checkpoint from memory, with real training and torchrun."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.ports import free_ports
from tests.training.job.test_restart import job, last_step, ranks, records
from tests.training.support.runs import losses, train, wait_for, write_text
from training.checkpoint.free_memory import is_tmpfs
from training.checkpoint.memory_folder import PREFIX, places

pytestmark = pytest.mark.processes

MEMORY = Path("/dev/shm")
STEPS = 24
FLAGS = (f"--num_steps={STEPS}", "--checkpoint_in_memory=True")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("undisturbed") / "save", data, 2, 2, STEPS)


@pytest.fixture(autouse=True)
def memory() -> None:
    if not is_tmpfs(MEMORY):
        pytest.skip("/dev/shm is no tmpfs here")


def kept(save: Path) -> list[Path]:
    """Return a run's folders in memory; another test's job may have the same name."""
    pattern = f"{PREFIX}4242.0-*/rank_*/step_*_ckp/note.json"
    found = set()
    for note in (one for place in places(os.environ) for one in place.glob(pattern)):
        with suppress(FileNotFoundError):  # an older copy is removed once the next exists
            if str(save) in note.read_text():
                found.add(note.parents[2])
    return sorted(found)


def saved(save: Path, step: int) -> bool:
    return (save / "checkpoints" / f"step_{step}_ckp").exists() and last_step(save) > step + 1


def test_a_killed_rank_goes_on_from_memory_and_past_a_broken_copy_from_disk(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    save, said = tmp_path / "save", tmp_path / "said"
    with job(save, data, *FLAGS) as process:
        assert wait_for(lambda: saved(save, 4), process, 240)
        [folder] = kept(save)
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(ranks(process.pid)[1], signal.SIGKILL)
        assert wait_for(lambda: len(records(save, "training")) == 2, process, 240)
        assert kept(save) == [folder]
        first = records(save, "training")[-1]["step"]
        # The next restart finds a damaged copy; while they are stopped, the ranks write no new one.
        assert wait_for(lambda: saved(save, first + 4), process, 240)
        for pid in ranks(process.pid):
            os.kill(pid, signal.SIGSTOP)
        for copy in folder.glob("rank_0/step_*_ckp/__0_0.distcp"):
            with copy.open("r+b") as file:
                file.seek(copy.stat().st_size // 2)
                file.write(b"other bytes")
        for pid in ranks(process.pid):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(300) == 0, said.read_text()
    text = said.read_text()
    assert losses(save) == undisturbed
    from_memory, from_both = records(save, "training")[1:]
    assert from_memory["in_memory"] == 1.0 and from_memory["read"] > 0
    assert 0.0 < from_both["in_memory"] < 1.0
    assert re.search(r"goes on after step \d+, .*; its state was read from memory in \d", text)
    assert re.search(r"its state was read from memory \(\d+%\) and disk in \d", text)
    assert text.count("WARNING: checkpoint_in_memory") == 1
    assert (
        "1 of 2 ranks have their part from disk: rank 0: the copy of __0_0.distcp has another"
        in text
    )
    assert not folder.exists() and not kept(save)


def test_two_nodes_send_each_other_what_they_share(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Each has its own memory. From the disk, only the manifest and sizes are read."""
    save, said = tmp_path / "save", tmp_path / "said"
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "NODES": "n1 n2"}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "PREFLIGHT": "0"}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(job(save, data, *FLAGS, nproc=1, SLURM_NODEID=one, **nodes, **here))
            for one in ("0", "1")
        )
        assert wait_for(lambda: saved(save, 4), first, 240)
        assert len(kept(save)) == 2
        os.kill(ranks(second.pid)[0], signal.SIGKILL)
        assert first.wait(300) == 0 and second.wait(300) == 0, said.read_text()
    text = said.read_text()
    assert losses(save) == undisturbed
    assert [one["in_memory"] for one in records(save, "training")] == [None, 1.0]
    assert "its state was read from memory in" in text and "0.0 MB from disk" in text
    assert not kept(save)


def test_an_agent_that_is_killed_leaves_what_the_next_job_removes(
    data: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    save = tmp_path / "save"
    with job(save, data, *FLAGS) as process:
        assert wait_for(lambda: saved(save, 4), process, 240)
        [folder] = kept(save)
        processes.kill((process.pid, *processes.descendants(process.pid)))
        process.wait()
    folder.mkdir(0o700, exist_ok=True)  # a job of another test may have removed it
    with job(save, data, *FLAGS, SLURM_RESTART_COUNT="1") as process:
        assert process.wait(300) == 0, (tmp_path / "said").read_text()
    assert not folder.exists()
    assert losses(save) == undisturbed
