"""Runs resume from copies in memory; the test tells them the place, as an agent does."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.support.disks import small_disk
from tests.training.support.runs import TINY, losses, run, train, write_text
from training import manifest
from training.checkpoint.free_memory import is_tmpfs
from training.checkpoint.memory_choice import NO_AGENT
from training.checkpoint.memory_folder import STARTS, VARIABLE

pytestmark = pytest.mark.processes

STEPS = 12
SCHEDULE = ("--schedule=constant", "--warmup=0")  # one rate for runs of any length


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in this machine's memory."""
    place = Path("/dev/shm")
    if not is_tmpfs(place):
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(prefix="sqshforge-test-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: str) -> list[float]:
    return train(tmp_path_factory.mktemp("undisturbed") / "save", data, 0, 2, STEPS, *SCHEDULE)


def test_a_run_that_may_not_restart_in_place_says_so(tmp_path: Path, data: str) -> None:
    flags = (*TINY, f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}", "--num_steps=1")
    done = run(0, *flags)
    assert f"checkpoint_in_memory=auto: off, as {NO_AGENT}" in done.stdout
    asked = run(0, *flags, "--checkpoint_in_memory=True")
    assert asked.returncode == 2 and f"error: checkpoint_in_memory: {NO_AGENT}" in asked.stderr
    assert "checkpoint_in_memory" not in run(0, *flags, "--checkpoint_in_memory=False").stdout


@pytest.mark.parametrize("state", ["sound", "older", "flipped"])
def test_a_restart_with_copies_of_each_kind(
    tmp_path: Path,
    memory: Path,
    data: str,
    undisturbed: list[float],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    """Whatever the state of the copies, the losses are those of an undisturbed run."""
    save = tmp_path / "save"
    monkeypatch.setenv(VARIABLE, str(memory))
    flags = (
        *(*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--batch_size=2"),
        *("--checkpoint_interval=4", "--checkpoint_in_memory=True", *SCHEDULE),
    )
    own = memory / "rank_0"
    assert run(0, *flags, "--num_steps=4").returncode == 0
    if state == "older":
        shutil.copytree(own, tmp_path / "before")
    if state != "sound":
        assert run(0, *flags, "--num_steps=8").returncode == 0
        assert [one.name for one in own.iterdir()] == ["step_8_ckp"]
    if state == "older":
        shutil.rmtree(own)
        shutil.copytree(tmp_path / "before", own)
    if state == "flipped":
        copy = own / "step_8_ckp" / "__0_0.distcp"
        data_of_it = bytearray(copy.read_bytes())
        data_of_it[len(data_of_it) // 2] ^= 1
        copy.write_bytes(data_of_it)
    monkeypatch.setenv(STARTS, "2")
    done = run(0, *flags, f"--num_steps={STEPS}")
    assert done.returncode == 0, done.stderr
    assert losses(save) == undisturbed
    why = {
        "older": "rank 0: no copy of step_8_ckp, only of step_4_ckp",
        "flipped": "rank 0: the copy of __0_0.distcp has another checksum",
    }
    assert done.stdout.count("WARNING: checkpoint_in_memory") == (state in why)
    if state in why:
        line = f"1 of 1 ranks have their part from disk: {why[state]}"
        assert line in done.stdout and " 0.0 MB from the nodes' memory" in done.stdout
    else:
        assert " 0.0 MB from disk" in done.stdout
    assert [one.name for one in own.iterdir()] == [f"step_{STEPS}_ckp"]


FILLED = """
import sys
from pathlib import Path
from training import mamba_fsdp
from training.entrypoint import enter, leave
from training.trainer import trainer

turn = trainer.Trainer.turn
def turn_by_turn(self):
    filler = Path(sys.argv[1]) / "filler"
    if self.step == 2:
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
    if self.step == 10:
        filler.unlink()
    return turn(self)
trainer.Trainer.turn = turn_by_turn
leave(enter(mamba_fsdp.configure, sys.argv[2:]))
"""


def test_a_full_tmpfs_costs_a_line_and_no_save(
    tmp_path: Path, data: str, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "filled.py").write_text(FILLED)
    save = tmp_path / "save"
    with small_disk(tmp_path / "memory", "50m") as disk:
        monkeypatch.setenv(VARIABLE, str(disk.path))
        flags = (
            *(*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--batch_size=2"),
            *("--checkpoint_interval=4", f"--num_steps={STEPS}", *SCHEDULE),
        )
        program = (str(tmp_path / "filled.py"), str(disk.path))
        done = disk.train(0, *flags, program=program)
        assert done.returncode == 0, done.stderr
        assert [one.name for one in (disk.seen / "rank_0").iterdir()] == [f"step_{STEPS}_ckp"]
    assert losses(save) == undisturbed
    said = done.stdout + done.stderr
    assert said.count("WARNING: checkpoint_in_memory: no copy of step_4_ckp is kept") == 1
    assert said.count("WARNING") == 1
    path = save / "checkpoints" / "step_8_ckp"
    complete, _ = manifest.read(path)
    assert complete is not None and not manifest.rotten(path, complete)
    assert "checkpoint_in_memory=auto: on, as two copies take" in said


TWO_NODES = """
import os, sys
from pathlib import Path
from training import mamba_fsdp
from training.checkpoint import memory_reader
from training.entrypoint import enter, leave

node = Path(os.environ["CHECKPOINT_MEMORY"], os.environ["RANK"])
node.mkdir(exist_ok=True)
os.environ["CHECKPOINT_MEMORY"], os.environ["LOCAL_WORLD_SIZE"] = str(node), "1"
memory_reader.SENT = int(os.environ["SENT"])
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("sent", "rotten"), [(64 << 20, True), (0, False), (0, True)], ids=["sent", "read", "rotten"]
)
def test_what_only_another_node_has(
    tmp_path: Path,
    memory: Path,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    sent: int,
    rotten: bool,
) -> None:
    """It is sent if it is small; otherwise it is read from disk, after its checksum is verified.

    With ddp all ranks hold the same, and each writes a part of it.
    """
    (tmp_path / "two_nodes.py").write_text(TWO_NODES)
    program, save = (str(tmp_path / "two_nodes.py"),), tmp_path / "save"
    monkeypatch.setenv(VARIABLE, str(memory))
    monkeypatch.setenv("SENT", str(sent))
    flags = (
        *(*TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", "--batch_size=1"),
        *("--checkpoint_interval=4", "--checkpoint_in_memory=True", *SCHEDULE),
        "--sharding_strategy=ddp",
    )
    first = run(2, *flags, "--num_steps=8", program=program, timeout=600)
    assert first.returncode == 0, first.stderr
    before = losses(save)
    if rotten:
        file = save / "checkpoints" / "step_8_ckp" / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    done = run(2, *flags, "--num_steps=9", program=program, timeout=600)
    assert done.returncode == 0, done.stderr
    assert losses(save)[:8] == before
    sources = re.search(r"([\d.]+) MB from the nodes' memory, ([\d.]+) MB from disk", done.stdout)
    assert sources is not None
    from_memory, from_disk = map(float, sources.groups())
    if sent or not rotten:
        assert "step_8_ckp at step 8" in done.stdout
        assert from_memory > 0 and (from_disk == 0) == bool(sent)
        assert "WARNING: check" not in done.stdout
    else:
        assert from_memory == 0 and from_disk > 0
        assert "step_4_ckp at step 4" in done.stdout
        assert "__0_0.distcp is not what was written" in done.stdout
        assert "; it is read from disk instead" in done.stdout
        assert f"checkpoint {save}/checkpoints/step_8_ckp is broken" in done.stdout
