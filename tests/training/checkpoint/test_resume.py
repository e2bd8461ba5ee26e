"""A run that is killed at any moment and restarted ends like one that never was."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.training.support.runs import (
    COLD,
    ENGINES,
    TINY,
    kill_tree,
    losses,
    rank_processes,
    run,
    started,
    steps,
    train,
    wait_for,
    write_text,
)
from training import compat

pytestmark = pytest.mark.processes

STEPS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    """A run on two ranks from start to end, with its checkpoints."""
    save = tmp_path_factory.mktemp("undisturbed")
    train(save, data, 2, 2, STEPS, "--checkpoint_interval=10")
    return save


def flags(save: Path, data: str, *more: str) -> tuple[str, ...]:
    return (
        *TINY,
        f"--dataset_path={data}",
        f"--save_ckpt_path={save}",
        "--batch_size=2",
        f"--num_steps={STEPS}",
        *more,
    )


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name.split("_")[1]) for path in folder.glob("step_*_ckp")), default=0)


def resumed_from(folder: Path, step: int) -> str:
    return f"resumed from {folder}/step_{step}_ckp at step {step}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kills", "quick", "more"),
    [
        # Fewer if this runs a second time, on an old torch.
        (20 if compat.fsdp2() else 8, True, ()),
        (2, False, ("--fsdp_engine=fsdp1",)),
        (2, False, ("--model_name=llama-tiny",)),
    ],
)
def test_kill_9_at_random_moments(
    tmp_path: Path, data: str, kills: int, quick: bool, more: Any
) -> None:
    """One run is killed over and over: after some steps, during a save, after some time.

    Most of its processes start quickly; some start like users' do.
    """
    length = 6 * kills + 34
    calm, harried = tmp_path / "calm", tmp_path / "harried"
    train(calm, data, 2, 2, length, *more)
    asked = (f"--num_steps={length}", "--checkpoint_interval=2", "--report_interval=1", *more)
    lines, folder = harried / "metrics.jsonl", harried / "checkpoints"
    chance = random.Random(4)
    interrupted_saves = complete = 0
    for kill in range(kills + 3):  # the last three only until one has hit a save
        if kill >= kills and interrupted_saves:
            break
        before = lines.stat().st_ino if lines.exists() else 0
        begun = newest(folder)
        assert begun >= complete, "a kill has cost a complete checkpoint"
        goal = begun + chance.randint(1, 8)

        def in_a_save() -> bool:
            return any(folder.glob("step_*.tmp"))

        def trains(before: int = before) -> bool:
            return lines.exists() and lines.stat().st_ino != before  # cut to the resumed step

        def far_enough(goal: int = goal) -> bool:
            return trains() and lines.read_text().count('"kind": "step"') >= goal

        def saves_again(begun: int = begun) -> bool:
            return newest(folder) > begun and in_a_save()

        moment = (far_enough, saves_again, trains)[kill % 3] if kill < kills else saves_again
        python = warm.python() if quick else COLD
        with started(2, *flags(harried, data, *asked), python=python) as process:
            assert wait_for(moment, process, seconds=120), "it ended before it was killed"
            if moment is not far_enough:
                time.sleep(chance.uniform(0, 0.01 if moment is saves_again else 0.1))
            complete = newest(folder)
            kill_tree(process, warm.forked() if quick else ())
            assert process.wait() == -signal.SIGKILL
            interrupted_saves += in_a_save()
            said, _ = process.communicate()
            assert not begun or resumed_from(folder, begun) in said, said
    assert interrupted_saves, "no kill fell into a save"
    begun = newest(folder)
    assert begun >= complete
    done = run(2, *flags(harried, data, *asked))
    assert done.returncode == 0, done.stderr
    assert resumed_from(folder, begun) in done.stdout
    assert [line["step"] for line in steps(harried)] == list(range(1, length + 1))
    assert steps(harried) == steps(calm)
    assert not list(folder.glob("*.tmp"))


def test_sigterm_on_one_rank_saves_on_all_and_ends_with_its_own_code(
    tmp_path: Path, data: str
) -> None:
    calm, asked_to_stop = tmp_path / "calm", tmp_path / "stopped"
    train(calm, data, 2, 2, 200, "--checkpoint_interval=100")
    asked = flags(asked_to_stop, data, "--report_interval=1", "--num_steps=200")
    with started(2, *asked) as process:
        assert wait_for((asked_to_stop / "metrics.jsonl").exists, process)
        assert wait_for(lambda: len(losses(asked_to_stop)) >= 3, process)
        os.kill(rank_processes(process)[1], signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert "start again to go on" in out
    assert "exitcode  : 85" in err, "torchrun tells the workers' code"
    assert run(2, *asked).returncode == 0
    assert steps(asked_to_stop) == steps(calm)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_under_plain_python_saves_and_exits_85(
    tmp_path: Path, data: str, how: signal.Signals
) -> None:
    asked = flags(tmp_path, data, "--num_steps=100000", "--report_interval=1")
    with started(0, *asked, python=COLD) as process:
        assert wait_for((tmp_path / "metrics.jsonl").exists, process)
        process.send_signal(how)
        process.communicate(timeout=300)
        assert process.returncode == 85
    assert len(list((tmp_path / "checkpoints").glob("step_*_ckp"))) == 1


def resume(save: Path, data: str, undisturbed: Any, ranks: int, *more: str) -> Any:
    """Resume from a copy of the undisturbed run's checkpoints without the last one."""
    shutil.copytree(undisturbed / "checkpoints", save / "checkpoints", dirs_exist_ok=True)
    shutil.rmtree(save / "checkpoints" / f"step_{STEPS}_ckp")
    return run(ranks, *flags(save, data, *more))


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, ("--batch_size=4",)), (2, ("--sharding_strategy=ddp",)), (2, ("--fsdp_engine=fsdp1",))],
)
def test_other_ranks_and_layouts_go_on_with_the_same_data(
    tmp_path: Path, data: str, undisturbed: Any, ranks: int, more: Any
) -> None:
    done = resume(tmp_path, data, undisturbed, ranks, *more)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(undisturbed)[20:], abs=1e-5)
    assert ("it was saved by 2 ranks, now 1" in done.stdout) == (ranks == 1)


def test_load_path_is_the_start_of_a_new_folder(
    tmp_path: Path, data: str, undisturbed: Any
) -> None:
    done = run(0, *flags(tmp_path, data, f"--load_ckpt_path={undisturbed}", "--num_steps=31"))
    assert done.returncode == 0, done.stderr
    assert f"resumed from {undisturbed}/checkpoints/step_{STEPS}_ckp" in done.stdout
    assert [line["step"] for line in steps(tmp_path)] == [31]
    gone = run(0, *flags(tmp_path, data, f"--load_ckpt_path={tmp_path}/gone", "--num_steps=32"))
    assert gone.returncode == 0, gone.stderr  # a restarted run has its own
    assert f"resumed from {tmp_path}/checkpoints/step_31_ckp" in gone.stdout


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("nowhere", " has no checkpoint; fix: name"),
        ("empty", " has no checkpoint; fix: name"),
        ("run/checkpoints/step_7_ckp", " has no checkpoint; fix: name"),
        ("x" * 300, "/checkpoints cannot be read: File name too long"),
    ],
    ids=["nowhere", "empty", "no-such-step", "long"],
)
def test_a_load_path_without_a_checkpoint_is_refused(
    tmp_path: Path, data: str, undisturbed: Any, load: str, said: str
) -> None:
    """It must not train from random weights instead."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").symlink_to(undisturbed)
    done = run(0, *flags(tmp_path / "save", data, f"--load_ckpt_path={tmp_path}/{load}"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"load_ckpt_path: {tmp_path}/{load}{said}" in done.stderr
    assert not (tmp_path / "save" / "metrics.jsonl").exists()


def test_a_load_path_that_is_the_runs_own_may_be_empty(tmp_path: Path, data: str) -> None:
    (tmp_path / "same").symlink_to(tmp_path / "save")
    done = run(0, *flags(tmp_path / "save", data, f"--load_ckpt_path={tmp_path}/same/"))
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, data: str, undisturbed: Any
) -> None:
    path = undisturbed / "checkpoints" / f"step_{STEPS}_ckp"
    copy = tmp_path / "checkpoints" / path.name
    shutil.copytree(path, copy)
    manifest = copy / "manifest.json"
    text = manifest.read_text().replace('"d_model": 128', '"d_model": 64')
    manifest.write_text(text.replace('"n_layer": 2', '"n_layer": 3'))
    done = run(0, *flags(tmp_path, data, "--num_steps=40"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "is of another model; fix: " in done.stderr
    assert "d_model: 64 in the checkpoint, 128 asked for" in done.stderr
    assert "n_layer: 3 in the checkpoint, 2 asked for" in done.stderr


def test_fewer_steps_than_the_checkpoint_are_refused(
    tmp_path: Path, data: str, undisturbed: Any
) -> None:
    done = run(0, *flags(tmp_path, data, f"--load_ckpt_path={undisturbed}", "--num_steps=5"))
    assert done.returncode == 2 and "num_steps: 5 is less than the 30 steps" in done.stderr
    assert "step_30_ckp; fix: " in done.stderr


def test_no_more_steps_than_those_of_another_run_are_refused(
    tmp_path: Path, data: str, undisturbed: Any
) -> None:
    """It must not train nothing instead. A run with all its steps is done when it is requeued."""
    asked = flags(tmp_path, data, f"--load_ckpt_path={undisturbed}")
    done = run(0, *asked)
    path = undisturbed / "checkpoints" / f"step_{STEPS}_ckp"
    assert done.returncode == 2 and "done: " not in done.stdout
    assert f"num_steps: {STEPS} are those of the whole run, and {path} has taken" in done.stderr
    assert "; fix: give more" in done.stderr
    shutil.copytree(undisturbed / "checkpoints", tmp_path / "checkpoints", dirs_exist_ok=True)
    done = run(0, *asked)
    assert done.returncode == 0 and f"done: {STEPS} steps" in done.stdout, done.stderr


def test_a_setting_that_is_another_on_resumption_is_reported(
    tmp_path: Path, data: str, undisturbed: Any
) -> None:
    changed = ("--schedule=cosine", "--min_lr=0", "--learning_rate=1e-3", "--seq_length=9")
    done = resume(tmp_path, data, undisturbed, 0, *changed)
    assert done.returncode == 0, done.stderr
    *warnings, data_is = [line for line in done.stdout.splitlines() if line.startswith("WARNING: ")]
    shown = "\n".join(warnings)
    assert "the data, or a setting that cuts or orders it, is not that of the check" in data_is
    assert "seq_length: the checkpoint was made with 17, this is 9" in shown
    assert "schedule: the checkpoint was made with quadratic-cosine, this is cosine" in shown
    assert "min_lr: the checkpoint was made with 1e-05, this is 0" in shown
    assert all("the new value is used" in line for line in warnings)


def test_another_way_to_compute_on_resumption_is_reported(
    tmp_path: Path, data: str, undisturbed: Any
) -> None:
    changed = ("--reset_documents", "--precision=bf16", "--reduce_precision=fp32")
    done = resume(tmp_path, data, undisturbed, 2, *changed)
    assert done.returncode == 0, done.stderr
    for what in (
        "reset_documents: the checkpoint was made with False, this is True",
        "precision: the checkpoint was made with fp32, this is bf16",
        "reduce_precision: the checkpoint was made with auto, this is fp32",
    ):
        assert f"WARNING: {what}; the new value is used" in done.stdout


def test_a_schedule_in_tokens_counts_those_of_an_earlier_global_batch(
    tmp_path: Path, data: str
) -> None:
    """With 17 tokens per sequence: two steps of 2 sequences, then steps of 4 to the end at 272."""
    timed = ("--schedule=wsd", "--t_warmup=0tok", "--t_decay=136tok", "--t_max=272tok")
    asked = flags(tmp_path, data, *timed, "--alpha_f=0", "--num_steps=20", "--report_interval=1")
    small = run(0, *asked, "--num_steps=8", "--checkpoint_interval=2")
    assert small.returncode == 0, small.stderr
    for step in (4, 6, 8):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step}_ckp")
    done = run(0, *asked, "--batch_size=4", "--num_steps=5")
    assert done.returncode == 0, done.stderr
    found = [(line["tokens_seen"], line["learning_rate"]) for line in steps(tmp_path)]
    assert [tokens for tokens, _ in found] == [34, 68, 136, 204, 272]
    assert [rate for _, rate in found] == pytest.approx([3e-3, 3e-3, 3e-3, 1.5e-3, 0])


def test_what_a_model_is_trained_with_may_be_another_on_resumption(
    tmp_path: Path, data: str
) -> None:
    def go_on(coefficient: float, length: int) -> Any:
        (tmp_path / "run.yaml").write_text(
            f"model: {{name: mixtral-tiny, balance_coefficient: {coefficient}}}\n"
            f"data: {{dataset_path: '{data}', seq_length: 17, batch_size: 1}}\n"
            f"run: {{save_ckpt_path: {tmp_path}/run, num_steps: {length}}}\n"
        )
        return run(0, f"--config={tmp_path}/run.yaml", program=("-m", "training"))

    assert go_on(0.01, 2).returncode == 0
    done = go_on(0.02, 3)
    assert done.returncode == 0, done.stderr
    shown = "WARNING: balance_coefficient: the checkpoint was made with 0.01, this is 0.02; the new"
    assert shown in done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_the_optimizers_settings_can_be_others_on_resumption(
    tmp_path: Path, data: str, undisturbed: Any, engine: str
) -> None:
    """For all parameters, for some as before, and back: each step uses the settings asked for."""
    decayed, spared = ("--decay_all=True", "--weight_decay=30"), ("--weight_decay=0",)
    spread = f"--fsdp_engine={engine}"
    done = resume(tmp_path, data, undisturbed, 2, spread, *decayed)
    assert done.returncode == 0, done.stderr
    assert "weight_decay: the checkpoint was made with 0.1, this is 30.0; the new" in done.stdout
    assert losses(tmp_path)[0] == pytest.approx(losses(undisturbed)[20], abs=1e-5)
    assert losses(tmp_path)[1] != pytest.approx(losses(undisturbed)[21], abs=1e-3)
    for length, more in ((31, decayed), (32, spared)):
        done = run(2, *flags(tmp_path, data, spread, *more, f"--num_steps={length}"))
        assert done.returncode == 0, done.stderr
        assert [line["step"] for line in steps(tmp_path)][-1] == length


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_may_have_fewer_rows_than_there_are_ranks(
    tmp_path: Path, data: str, engine: str
) -> None:
    """Like the heads of a Mamba-2 on many GPUs: some ranks have no part of it to save."""
    (tmp_path / "run.yaml").write_text(
        "model: {name: mamba2-tiny, head_dim: 128}\n"  # for 256 channels
        f"data: {{dataset_path: '{data}', seq_length: 17, batch_size: 1}}\n"
        f"parallel: {{sharding_strategy: fsdp, fsdp_engine: {engine}}}\n"
        f"run: {{save_ckpt_path: {tmp_path}/run, num_steps: 4, checkpoint_interval: 2}}\n"
    )
    asked = (f"--config={tmp_path}/run.yaml",)
    first = run(4, *asked, program=("-m", "training"))
    assert first.returncode == 0, first.stderr
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_4_ckp")
    again = run(4, *asked, program=("-m", "training"))
    assert again.returncode == 0, again.stderr
    assert "step_2_ckp at step 2" in again.stdout
    assert losses(tmp_path / "run") == whole


OF_A_GPU = """
import sys
import torch
from training import mamba_fsdp
from training.checkpoint import dcp
from training.entrypoint import enter, leave
random = dcp._random
dcp._random = lambda device: {**random(device), "cuda": torch.zeros(16, dtype=torch.uint8)}
leave(enter(mamba_fsdp.configure, sys.argv[1:]))
"""
"""Lets ranks have and save the random state of a GPU, although none exists to restore it."""


def test_from_a_cpu_to_a_gpu_and_back(tmp_path: Path, data: str, undisturbed: Any) -> None:
    """A random state that the checkpoint does not have is not required."""
    program = tmp_path / "of_a_gpu.py"
    program.write_text(OF_A_GPU)
    folder, line = tmp_path / "checkpoints", "was made without a GPU: the random numbers of GPUs"
    shutil.copytree(undisturbed / "checkpoints" / "step_20_ckp", folder / "step_20_ckp")
    asked = flags(tmp_path, data, "--checkpoint_interval=5")
    on_gpu = run(2, *asked, program=(str(program),))
    assert on_gpu.returncode == 0, on_gpu.stderr
    assert on_gpu.stdout.count(line) == 1
    shutil.rmtree(folder / f"step_{STEPS}_ckp")
    back = run(2, *asked)
    assert back.returncode == 0, back.stderr
    assert f"resumed from {folder}/step_25_ckp" in back.stdout and line not in back.stdout
    assert steps(tmp_path) == steps(undisturbed)[20:]
