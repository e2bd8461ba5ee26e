"""A run that is killed and started again ends as if it had not been interrupted."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.composer.runs import ENTRY_POINT, PROGRAM, run, settings, started, write, write_packed
from tests.support.processes import descendants
from tests.training.support.runs import kill_tree, losses, steps, wait_for
from training.errors import SAVED


def test_killed_in_the_middle_and_started_again(tmp_path: Path) -> None:
    """Kill -9 two ranks some steps after a checkpoint, with worker processes that read ahead."""
    write_packed(tmp_path)
    make = partial(settings, tmp_path, scheduler__t_max="14ba", trainer__save_interval="4ba")
    calm = write(tmp_path / "calm.yaml", make(tmp_path / "calm"))
    done = run(2, calm)
    assert done.returncode == 0, done.stderr

    save = tmp_path / "save"
    config = write(tmp_path / "killed.yaml", make(save, data__num_workers=1))
    metrics = save / "metrics.jsonl"

    def is_beyond() -> bool:
        return (save / "latest-rank0.pt").exists() and '"step": 6,' in metrics.read_text()

    with started(2, *ENTRY_POINT, config) as process:
        assert wait_for(is_beyond, process, seconds=200), "it ended before it was killed"
        kill_tree(process)
    # A kill while the next checkpoint is written leaves a truncated file, and no link.
    last = (save / "latest-rank0.pt").resolve()
    (save / "ep0-ba13-rank0.pt").write_bytes(last.read_bytes()[:5000])
    (save / "latest-rank0.pt").unlink()

    again = run(2, config)
    assert again.returncode == 0, again.stderr
    assert f"resuming from {last}" in again.stdout
    first = int(again.stdout.partition("\nstep ")[2].partition("/")[0])
    assert 4 < first <= 13, "it did not resume in the middle"
    assert [one["step"] for one in steps(save)] == list(range(1, 15))
    assert losses(save) == losses(tmp_path / "calm")
    assert steps(save) == steps(tmp_path / "calm")


def test_stopped_by_sigterm_and_started_again(tmp_path: Path) -> None:
    """Only one of two ranks is asked; both save between checkpoints, and exit with that code."""
    write_packed(tmp_path)
    make = partial(settings, tmp_path, scheduler__t_max="40ba", trainer__save_interval="100ba")
    calm = write(tmp_path / "calm.yaml", make(tmp_path / "calm"))
    assert run(2, calm).returncode == 0

    save = tmp_path / "save"
    config = write(tmp_path / "stopped.yaml", make(save))
    metrics = save / "metrics.jsonl"
    with started(2, *ENTRY_POINT, config) as process:
        assert wait_for(
            lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), process, seconds=200
        ), "it ended before it was asked"
        [asked, _] = ranks(process)
        os.kill(asked, signal.SIGUSR1)
        said = process.communicate(timeout=300)[0]
    assert process.returncode == SAVED
    stop = int(said.partition("asked to stop after step ")[2].partition(":")[0])
    assert 3 <= stop < 40 and (save / f"ep0-ba{stop}-rank0.pt").is_file()

    again = run(2, config)
    assert again.returncode == 0, again.stderr
    assert "resuming from" in again.stdout
    assert losses(save) == losses(tmp_path / "calm")


def test_a_longer_run_reads_on_and_other_data_is_reported(tmp_path: Path) -> None:
    write_packed(tmp_path)
    make = partial(settings, tmp_path, scheduler__t_decay="1ba", scheduler__t_warmup="1ba")
    save = tmp_path / "save"
    given = {
        "long": make(tmp_path / "long", scheduler__t_max="6ba"),
        "short": make(save, scheduler__t_max="3ba"),
        "longer": make(save, scheduler__t_max="6ba", data__n_samples_to_skip=800),
        "again": make(save, scheduler__t_max="6ba"),
        "other": make(save, scheduler__t_max="7ba", data__code_paths=[]),
    }
    files = [write(tmp_path / f"{name}.yaml", one) for name, one in given.items()]
    done = run(0, *files, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    states = [_state(tmp_path / name / "ep0-ba6-rank0.pt") for name in ("long", "save")]
    assert states[0] == states[1] and states[0]["samples"] == 48
    *_, longer, again, other = done.stdout.split("parameters, ")
    assert "resuming from" in longer and "step 4/6" in longer and "step 3/6" not in longer
    assert "\nstep" not in again, "a run that is done went on"
    assert (
        "WARNING: data: the data, or a setting that cuts or orders it, is not that of" in other
        and "step 7/7" in other
    )


def test_checkpoints_of_earlier_starts_count_among_those_that_are_kept(tmp_path: Path) -> None:
    write_packed(tmp_path)
    make = partial(settings, tmp_path, tmp_path / "save", scheduler__t_decay="1ba")
    files = []
    for keep, length in ((-1, 3), (2, 5), (2, 6)):
        given = make(scheduler__t_max=f"{length}ba", trainer__save_interval="1ba")
        given["trainer"]["save_num_checkpoints_to_keep"] = keep
        files.append(write(tmp_path / f"{length}.yaml", given))
    done = run(0, *files, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    kept = {path.name for path in (tmp_path / "save").glob("ep*.pt")}
    assert kept == {"ep0-ba5-rank0.pt", "ep0-ba6-rank0.pt"}


def _state(path: Path) -> dict[str, Any]:
    """Return the state of the data set in a checkpoint."""
    held = torch.load(path, weights_only=False)
    return dict(held["state"]["dataset_state"]["train"])


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the ranks below Composer's launcher."""
    return [
        pid
        for pid in descendants(process.pid)
        if b"training.mamba_composer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
