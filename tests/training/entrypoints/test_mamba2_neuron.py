"""The entry point for Mamba-2 on Neuron: the system's command lines on CPUs, at a small size."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports
from tests.training.support.runs import ROOT, kill_tree, losses, run, write_text
from training.errors import RequestError
from training.mamba2_neuron import configure
from training.models import Mamba2Config
from training.parallel.neuron import environment

ENTRY_POINT = ("-m", "training.mamba2_neuron")
TRY_RUN = (
    *("--tp", "8", "--model", "Mamba7B", "--data_dir", "SET", "--max_steps", "16"),
    *("--dtype", "bfloat16", "--use_zero_1", "--grad_accum_usteps", "1", "--lr", "0.001"),
    *("--checkpoint_freq", "8", "--checkpoint_dir", "./model_save/", "--tag", "mamba2_7b_testrun"),
    *("--vocab_size", "50288", "--warmup_steps", "5", "--batch", "1", "--rmsnorm_across_groups"),
    *("--beta1", "0.9", "--beta2", "0.95", "--weight_decay", "0.1"),
)
"""The system's own command line, except for its data."""
SMALL = ("--d_model=64", "--n_layer=2", "--head_dim=16", "--d_state=16", "--n_groups=4")


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set made with the system's command line."""
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "texts", size=20_000)
    save = folder / "texts_128"
    done = run(
        0,
        *("--seq_len", "128", "--save_path", str(save), "--dataset", str(folder / "texts")),
        *("--tokenizer", "bytes", "--num_proc", "2"),
        program=("-m", "training.tokenize_dataset"),
    )
    assert done.returncode == 0, done.stderr
    return save


def asked(data: Path, save: Path, **changes: str) -> list[str]:
    """Return the system's command line at a small size."""
    small = {"--data_dir": str(data), "--checkpoint_dir": str(save), "--max_steps": "6"}
    small |= {"--checkpoint_freq": "3", "--vocab_size": "256", "--backend": "gloo", **changes}
    given = list(TRY_RUN)
    for flag, value in small.items():
        if flag in given:
            given[given.index(flag) + 1] = value
        else:
            given += [flag, value]
    return [*given, *SMALL]


@pytest.mark.processes
def test_the_published_command_line(tokenized: Path) -> None:
    given = [str(tokenized) if word == "SET" else word for word in TRY_RUN]
    config = configure(given)
    sizes, data, optim, run_ = config.model.sizes, config.data, config.optim, config.run
    assert isinstance(sizes, Mamba2Config)
    assert (sizes.d_model, sizes.n_layer, sizes.n_groups, sizes.head_dim) == (4096, 64, 8, 128)
    assert (sizes.vocab_size, sizes.norm_across_groups, sizes.chunk_size) == (50288, True, 128)
    assert (data.seq_length, data.batch_size, data.gradient_accumulation) == (128, 1, 1)
    assert (optim.learning_rate, optim.beta1, optim.beta2) == (1e-3, 0.9, 0.95)
    assert (optim.weight_decay, optim.grad_clip_thresh) == (0.1, 1.0)
    assert (optim.schedule.name, optim.schedule.warmup_steps) == ("cosine-to-zero", 5)
    parallel = config.parallel
    assert (parallel.backend, parallel.tensor_parallel, parallel.zero1) == ("neuron", 8, True)
    assert (parallel.precision, parallel.master_weights) == ("bf16", True)
    assert (run_.device, run_.seed, run_.num_steps) == ("xla", 100, 16)
    assert (run_.checkpoint_interval, run_.report_interval) == (8, 1)
    assert run_.save_ckpt_path == "model_save/mamba2_7b_testrun"


@pytest.mark.processes
def test_the_script_of_several_instances(tokenized: Path) -> None:
    """What the system's launcher passes for 4 nodes of 32 cores, GBS 1024, MBS 1."""
    given = ["--model", "Mamba7B", "--tp", "8", "--data_dir", str(tokenized), "--batch", "1"]
    given += ["--grad_accum_usteps", "64", "--lr", "3e-4", "--warmup_steps", "1500"]
    given += ["--max_steps", "28000", "--checkpoint_freq", "5000", "--use_zero_1", "--use_zero_1"]
    config = configure([*given, "--dtype", "bfloat16", "--vocab_size", "50288"])
    assert config.data.gradient_accumulation == 64 and config.parallel.zero1
    assert config.optim.beta2 == 0.999 and config.run.save_ckpt_path == "exp"


@pytest.mark.processes
@pytest.mark.boxes
def test_it_trains_goes_on_and_is_converted(tokenized: Path, tmp_path: Path) -> None:
    """Two cores per layer and two readers; stopped half-way, then on one core: the same losses."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"--tp": "2", "--dtype": "float32", "--batch": "1"}
    done = run(4, *asked(tokenized, whole, **changes), program=ENTRY_POINT)
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout and "done: 6 steps" in done.stdout
    found = losses(whole / "mamba2_7b_testrun")
    assert len(found) == 6 and found[-1] < found[0]

    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "mamba2_7b_testrun" / "checkpoints" / "step_6_ckp")
    one = {"--tp": "1", "--dtype": "float32", "--batch": "2"}
    done = run(0, *asked(tokenized, parts, **one), program=ENTRY_POINT)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout and "it was saved by 4 ranks, now 1" in done.stdout
    assert losses(parts / "mamba2_7b_testrun") == pytest.approx(found, abs=1e-4)

    out = tmp_path / "out"
    argv = ("--from", "ours", str(whole / "mamba2_7b_testrun"), "--to", "neuron", str(out))
    done = run(0, *argv, program=("-m", "training.convert"))
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "config.json").read_text())["rmsnorm_within_groups"] is False


@pytest.mark.processes
@pytest.mark.boxes
def test_two_instances(tokenized: Path, tmp_path: Path) -> None:
    """Launch as on several instances: torchrun on each, which meet at the first one's address."""
    (port,) = free_ports(1)
    one = {"--tp": "2", "--dtype": "float32", "--max_steps": "2"}
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=7"]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    argv += [*meet, *ENTRY_POINT, *asked(tokenized, tmp_path, **one)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            kill_tree(node)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("done: 2 steps" in out for out, _ in said) == 1
    assert len(losses(tmp_path / "mamba2_7b_testrun")) == 2


@pytest.mark.processes
@pytest.mark.boxes
def test_a_pass_that_only_compiles(
    tokenized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.ONLY_COMPILE, "1")
    done = run(
        0, *asked(tokenized, tmp_path, **{"--tp": "1", "--max_steps": "1000"}), program=ENTRY_POINT
    )
    assert done.returncode == 0, done.stderr
    assert "compile_only: 4 steps were taken, and nothing is saved" in done.stdout
    assert not list((tmp_path / "mamba2_7b_testrun").glob("checkpoints/step_*"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            {"--checkpoint_load_dir": "./"},
            "--checkpoint_load_dir: has no effect without --checkpoint_load; fix: give both, or "
            "neither",
        ),
        (
            {"--checkpoint_load_tag": "t"},
            "--checkpoint_load_tag: has no effect without --checkpoint_load",
        ),
        (
            {"--compile_cache": "/c", "--backend": "gloo"},
            "--compile_cache: has no effect without --backend=xla, which alone compiles; fix: "
            "leave it out",
        ),
        ({"--tp": "3"}, "tp: 3 ranks cannot share 8 heads"),
        ({"--tp": "8"}, "tp: 8 ranks cannot share 4 groups (n_groups) evenly"),
        ({"--vocab_size": "255", "--tp": "2"}, "tp: 2 ranks cannot share 255 words"),
        ({"--chunk_size": "96"}, "seq_len: 128 is not a multiple of the chunk, 96"),
        ({"--backend": "mpi"}, "--backend: must be one of xla, nccl, gloo, not 'mpi'"),
        ({"--model": "Mamba13B"}, "did you mean Mamba3B?"),
        ({"--model": "Mamba2Hybrid8B"}, "--model: must be one of Mamba130M, Mamba370M"),
        ({"--max_steps": "0"}, "--max_steps: must be given"),
        ({"--data_dir": "/nowhere"}, "seq_len: must be given, as /nowhere is not a folder"),
        ({"--sharding_strategy": "ddp"}, "--sharding_strategy: there is no such flag"),
        ({"--groups_as_tp": "True"}, "--groups_as_tp: says how many groups there are"),
        ({"--debug": "True"}, "--debug: is not supported; fix: use --trace_nan=True"),
        (
            {"--sequence_parallel_enabled": "True"},
            "--sequence_parallel_enabled: is not supported; fix: leave",
        ),
        (
            {"--save_last_step": "False"},
            "--save_last_step: a checkpoint is always saved at the end; fix: leave",
        ),
        ({"--use_mix_precision": "True"}, "--use_mix_precision: write --dtype bfloat16"),
    ],
)
def test_what_cannot_be(tokenized: Path, tmp_path: Path, changes: Any, shown: str) -> None:
    with pytest.raises(RequestError) as error:
        configure(asked(tokenized, tmp_path, **{"--tp": "1", **changes}))
    assert shown in str(error.value)


@pytest.mark.processes
def test_groups_as_tp_is_the_known_program(tokenized: Path) -> None:
    given = ["--data_dir", str(tokenized), "--max_steps", "1", "--backend", "gloo"]
    sizes = configure([*given, "--tp", "4", "--groups_as_tp"]).model.sizes
    assert isinstance(sizes, Mamba2Config) and sizes.n_groups == 4


def test_nothing_that_is_set_is_changed(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    shown = environment.prepare(environ, tmp_path)
    assert environ[environment.CACHE] == str(tmp_path) and len(shown) == 5
    assert "--distribution-strategy=llm-training" in environ[environment.COMPILER]
    mine = {environment.COMPILER: "-O1 --cache_dir=/fsx/cache"}
    environment.prepare(mine, tmp_path)
    assert mine[environment.COMPILER] == "-O1 --cache_dir=/fsx/cache"
    assert environment.CACHE not in mine
