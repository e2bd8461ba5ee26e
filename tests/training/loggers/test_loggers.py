"""Where the records of a run go: TensorBoard, Weights & Biases, a bar on a terminal."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.events import curves
from tests.training.support.runs import ROOT, TINY, command, run, steps, write_text
from training import loggers
from training.config.config import RunConfig
from training.errors import RequestError
from training.loggers.console import Console
from training.loggers.text import AverageSpeed

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a run that resumes from what is in tmp_path/save."""
    data = write_text(tmp_path / "text")

    def again(num_steps: int, *flags: str) -> subprocess.CompletedProcess[str]:
        done = run(
            0,
            *TINY[:-1],
            f"--dataset_path={data}",
            f"--save_ckpt_path={tmp_path}/save",
            f"--num_steps={num_steps}",
            "--report_interval=5",
            "--checkpoint_interval=10",
            *flags,
        )
        assert done.returncode == 0, done.stderr
        return done

    return again


@pytest.mark.processes
def test_tensorboard_shows_one_history_of_a_run_that_was_cut_off(
    tmp_path: Path, start: Start
) -> None:
    save, events = tmp_path / "save", tmp_path / "events"
    flags = (f"--tensorboard_dir={events}", f"--eval_dataset_path={write_text(tmp_path / 'held')}")
    start(15, *flags)
    (save / "checkpoints" / "step_15_ckp").rename(tmp_path / "lost")  # resumes from step 10
    start(20, *flags)
    shown = curves(events)
    assert sorted(shown) == [
        *("evaluation_loss", "grad_norm", "learning_rate", "loss", "memory", "perplexity"),
        "tokens_per_second_per_device",
    ]
    assert [step for step, _ in shown["loss"]] == list(range(1, 21))
    assert [step for step, _ in shown["memory"]] == [5, 10, 15, 20]
    assert [step for step, _ in shown["perplexity"]] == [20], "that of step 15 was cut off"
    written = [line["loss"] for line in steps(save)]
    assert [value for _, value in shown["loss"]] == pytest.approx(written)


def test_the_mean_speed_leaves_the_first_steps_out() -> None:
    """With reports of 20 steps, those that begin after step 130 count, every 50 steps or more."""
    shown: list[str] = []
    console = Console()
    console.say = lambda text, file=None: shown.append(text)  # type: ignore[method-assign,assignment]
    logger = AverageSpeed(50, start=100, console=console)
    speeds = {120: 1.0, 140: 1.0, 160: 10.0, 180: 30.0, 200: 10.0, 220: 10.0}
    for step, speed in speeds.items():
        logger.write(
            [{"kind": "report", "step": step, "samples_per_second": speed, "tflops": speed / 4}]
        )
    assert shown == ["mean of steps 141 to 200: 12.86 samples/s, 3.21 TFLOPS/device"]


class Sent:
    """A run of W&B's library, which keeps what it is sent."""

    def __init__(self, step: int) -> None:
        self.step, self.lines, self.code = step, [], None

    lines: list[dict[str, Any]]
    code: int | None

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append({"step": step, **values})

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


def test_wandb_gets_the_known_keys_and_no_step_twice() -> None:
    from training.loggers.wandb import WeightsBiases

    sent = Sent(step=11)
    logger = WeightsBiases(sent)
    report = {
        **{"kind": "report", "loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-3, "mfu": None},
        **{"tokens_seen": 640, "tokens_per_second_per_device": 9.0, "memory_bytes": 7},
    }
    logger.write([{"kind": "step", "step": 15, "loss": 9.0}])
    logger.write([{**report, "step": step} for step in (10, 15)])
    logger.close(failed=True)
    values = {"loss": 2.5, "gradient norm": 1.5, "learning rate": 1e-3, "token seen": 640}
    assert sent.lines == [{"step": 15, **values, "throughput": 9.0, "gpu memory": 7}]
    assert sent.code == 1


@pytest.mark.processes
def test_wandb_goes_on_with_its_run(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real library; its process that sends ends with the run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    save = tmp_path / "save"
    start(10, "--use_wandb=True", "--wandb_project=tiny")
    known = json.loads((save / "wandb.json").read_text())
    assert known["project"] == "tiny"
    start(20, "--use_wandb=True", "--wandb_project=tiny")
    assert json.loads((save / "wandb.json").read_text()) == known
    runs = sorted((save / "wandb").glob(f"offline-run-*-{known['id']}"))
    assert len(runs) == 2, "each start leaves a folder of the same run"
    shown = runs[0].glob("run-*.wandb")
    assert b"gradient norm" in next(shown).read_bytes()


@pytest.mark.parametrize(
    ("given", "package", "hidden"),
    [
        ({"tensorboard_dir": "/x"}, "tensorboard", "tensorboard"),
        ({"use_wandb": True}, "wandb", "wandb"),
    ],
)
def test_a_package_that_is_missing_is_reported_before_anything_is_done(
    given: dict[str, Any], package: str, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith((hidden, "torch.utils.tensorboard", "training.loggers.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)  # type: ignore[arg-type]
    shown = f"{next(iter(given))}: {package} cannot be imported here .*; fix: pip install {package}"
    with pytest.raises(RequestError, match=shown):
        loggers.check(RunConfig(save_ckpt_path="/x", **given))
    loggers.check(RunConfig(save_ckpt_path="/x"))


def on_a_terminal(argv: list[str]) -> tuple[int, str]:
    """Run on a terminal of 120 columns; returns the exit code and all output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = subprocess.Popen(argv, env=env, stdout=slave, stderr=slave, stdin=slave)
    os.close(slave)
    seen = b""
    try:
        while piece := os.read(master, 65536):
            seen += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(master)
    return process.wait(60), seen.decode()


@pytest.mark.processes
@pytest.mark.parametrize("wanted", [True, False])
def test_a_bar_on_a_terminal_leaves_the_lines_whole(tmp_path: Path, wanted: bool) -> None:
    pytest.importorskip("tqdm")
    data = write_text(tmp_path / "text")
    flags = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/save", "--num_steps=20")
    code, seen = on_a_terminal(
        command(0, *TINY, *flags, "--report_interval=5", f"--progress={wanted}")
    )
    assert code == 0, seen
    assert bool(re.search(r"100%\|█+\| 20/20 .*step", seen)) == wanted
    # What a person reads: the part of each line after the last carriage return.
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in seen.split("\n")]
    reports = [line for line in lines if " s/step | " in line]
    assert len(reports) == 4
    for number, line in enumerate(reports, 1):
        assert re.fullmatch(rf"step {number * 5}/20 \| loss .* s left", line), line
    assert any(re.fullmatch(r"selective_scan: torch on cpu, .*", line) for line in lines)
