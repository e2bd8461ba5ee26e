"""Full disks: a checkpoint without space ends the run but spares the others; a log does not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.disks import small_disk
from tests.training.support.events import curves
from tests.training.support.runs import TINY, losses, run, steps, train, write_text
from training import manifest
from training.loggers.base import FaultTolerantLogger, Logger
from training.loggers.console import Console

pytestmark = pytest.mark.processes

STEPS = 14
PROGRAM = """
import sys
from pathlib import Path
from training import mamba_fsdp, manifest
from training.trainer import trainer
from training.entrypoint import enter, leave

def fill(disk):
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
{change}
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""
FULL_AT_THE_MANIFEST = """
publish = manifest.publish
def publish_without_room(folder, reported):
    if reported.step == 10:
        fill(folder.parent)
    return publish(folder, reported)
manifest.publish = publish_without_room
"""
FULL_FROM_STEP_20_TO_100 = """
turn = trainer.Trainer.turn
def turn_by_turn(self):
    last = turn(self)
    folder = Path(self.config.run.save_ckpt_path)
    if self.step == 20:
        fill(folder)
    if self.step == 100:
        (folder / "filler").unlink()
    return last
trainer.Trainer.turn = turn_by_turn
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    save = tmp_path_factory.mktemp("undisturbed")
    train(save, data, 2, 2, STEPS)
    return save


def program(folder: Path, change: str) -> tuple[str]:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(change=change))
    return (str(path),)


@pytest.mark.parametrize(
    ("ranks", "background", "change"),
    [
        (2, True, ""),
        (2, False, ""),
        (0, False, ""),
        (0, True, FULL_AT_THE_MANIFEST),
    ],
)
def test_a_checkpoint_without_room(
    tmp_path: Path, data: str, undisturbed: Path, ranks: int, background: bool, change: str
) -> None:
    """The third of these does not fit; with space, the run resumes as if nothing had happened."""
    with small_disk(tmp_path / "save", "50m" if change else "5m") as disk:
        flags = (
            *(*TINY, f"--dataset_path={data}", f"--save_ckpt_path={disk.path}"),
            *(f"--num_steps={STEPS}", f"--batch_size={4 // max(1, ranks)}"),
            *("--checkpoint_interval=5", f"--async_checkpoint={background}"),
        )
        done = disk.train(ranks, *flags, program=program(tmp_path, change))
        assert done.returncode == 1, done.stderr
        folder = disk.path / "checkpoints"
        shown = re.search(
            rf"error: (rank \d: )?checkpoint {folder}/step_10_ckp.tmp could not be written "
            r"\(([\d,]+) bytes were free there when that failed, and a checkpoint takes ([\d,]+)\)",
            done.stderr,
        )
        assert shown and done.stderr.count("error: ") == 1, done.stderr
        free, takes = (int(number.replace(",", "")) for number in shown.groups()[1:])
        assert free < takes
        seen = disk.seen / "checkpoints"
        there = [path for path in seen.iterdir() if path.name != "filler"]
        assert [path.name for path in there] == ["step_5_ckp"]
        complete, fault = manifest.read(there[0])
        assert complete is not None and not manifest.rotten(there[0], complete), fault
        size = sum(file.size for file in complete.files.values())
        assert 0.9 < size / takes < 1.2
        assert not (disk.seen / ".running").exists()
        (seen / "filler").unlink(missing_ok=True)
        disk.resize("50m")
        again = disk.train(ranks, *flags)
        assert again.returncode == 0, again.stderr
        assert f"resumed from {folder}/step_5_ckp" in again.stdout
        within = 0 if ranks else 1e-5
        assert losses(disk.seen) == pytest.approx(losses(undisturbed), abs=within)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, data: str) -> None:
    """Here another file system is mounted in it; what is left of it does not end a later start."""
    flags = (
        *(*TINY, f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/save", "--batch_size=4"),
        *("--checkpoint_interval=2", "--keep_checkpoints=1"),
    )
    folder = tmp_path / "save" / "checkpoints"
    assert run(0, *flags, "--num_steps=2").returncode == 0
    held = folder / "step_2_ckp" / "held"
    left = folder / "step_2_ckp.tmp"
    with small_disk(held, "1m") as disk:
        second = disk.train(0, *flags, "--num_steps=4")
        assert second.returncode == 0, second.stderr
        assert f"WARNING: {left} cannot be removed: Device or resource busy" in second.stdout
        third = disk.train(0, *flags, "--num_steps=6")
        assert third.returncode == 0, third.stderr
        assert f"WARNING: {left} cannot be removed" in third.stdout
        assert f"resumed from {folder}/step_4_ckp" in third.stdout
    assert {path.name for path in folder.iterdir()} == {"step_6_ckp", left.name}
    last = run(0, *flags, "--num_steps=8")
    assert last.returncode == 0 and "cannot be removed" not in last.stdout
    assert [path.name for path in folder.iterdir()] == ["step_8_ckp"]


def test_a_full_disk_of_logs_costs_lines_and_nothing_else(tmp_path: Path, data: str) -> None:
    """The checkpoints are elsewhere. Records, curves and the log are all on the full disk."""
    pytest.importorskip("tensorboard")
    (tmp_path / "checkpoints").mkdir()
    with small_disk(tmp_path / "save", "256k") as disk:
        (disk.seen / "checkpoints").symlink_to(tmp_path / "checkpoints")
        flags = (
            *(*TINY, f"--dataset_path={data}", f"--save_ckpt_path={disk.path}"),
            *("--report_interval=1", f"--tensorboard_dir={disk.path}/events"),
            *("--checkpoint_interval=50", "--seed=1"),
        )
        changed = program(tmp_path, FULL_FROM_STEP_20_TO_100)
        log = f"{disk.path}/log"
        done = disk.train(0, *flags, "--num_steps=120", program=changed, to=log)
        assert done.returncode == 0, done.stderr
        saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert saved == ["step_100_ckp", "step_120_ckp", "step_50_ckp"]
        warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING: ")]
        assert sum("metrics.jsonl cannot be written: No space left" in w for w in warnings) == 1
        assert sum("standard output cannot be written: No space" in w for w in warnings) == 1
        assert sum(w.startswith("WARNING: TensorBoard: ") and "run goes on" in w for w in warnings)
        assert "TensorBoard is written again; " in done.stderr and "Traceback" not in done.stderr
        drawn = [step for step, _ in curves(disk.seen / "events")["loss"]]
        assert drawn == sorted(set(drawn)) and drawn[:10] == list(range(1, 11))
        assert drawn[-20:] == list(range(101, 121)) and len(drawn) < 60
        missing = re.search(r"metrics.jsonl is written again; (\d+) records", done.stderr)
        assert missing
        lines = [
            json.loads(line) for line in (disk.seen / "metrics.jsonl").read_text().splitlines()
        ]
        assert len(lines) + int(missing[1]) == 2 * 120 + 3, "a step and a report each, and saves"
        shown = [one["step"] for one in lines if one["kind"] != "save"]
        assert shown == sorted(shown)
        assert lines[-1]["step"] == 120 and int(missing[1]) > 100
        text = (disk.seen / "log").read_text()
        gap = re.search(r"^WARNING: (\d+) lines are missing here: No space left", text, re.M)
        assert gap and int(gap[1]) > 50
        assert "step 120/120 | loss" in text.partition(gap[0])[2]
        # A later start keeps what is there, and appends to it.
        again = disk.train(0, *flags, "--num_steps=122", to="/dev/full")
        assert again.returncode == 0, again.stderr
        assert again.stderr.count("WARNING: standard output cannot be written") == 1
        assert [one["step"] for one in steps(disk.seen)][-3:] == [120, 121, 122]
        assert len((disk.seen / "metrics.jsonl").read_text().splitlines()) == len(lines) + 5


class Broken(Logger):
    """A server that is unreachable from its second record to its fourth."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.calls = 0

    def write(self, records: list[Any]) -> None:
        self.calls += 1
        if 2 <= self.calls <= 4:
            raise ConnectionError("the server is away\nmore")
        self.taken += records

    def close(self, failed: bool) -> None:
        raise ConnectionError("the server is away again")


def test_faults_of_a_server_are_reported_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights & Biases is such a server: its library may raise anything."""
    broken = Broken()
    logger = FaultTolerantLogger(broken, "Weights & Biases", Console())
    for step in range(9):
        logger.write([{"step": step}] * 2)
        logger.step()
    logger.close(failed=False)
    assert [one["step"] for one in broken.taken[::2]] == [0, 4, 5, 6, 7, 8]
    name = "WARNING: Weights & Biases"
    assert capsys.readouterr().err.splitlines() == [
        f"{name}: the server is away; its records are dropped, the run goes on",
        f"{name} is written again; 6 records are missing",
        f"{name}: the server is away again; its records are dropped, the run goes on",
    ]
