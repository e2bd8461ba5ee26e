"""The calls into torch.sagemaker, against its documented interface (smp_contract/).

The library itself is not installed: this shows how it is called, not what it does.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support.runs import losses, run, steps
from training.errors import RequestError
from training.llama_smp import configure
from training.parallel import sagemaker
from training.parallel.sagemaker import limits
from training.process_group import Group

PROGRAM = ("-m", "tests.training.parallel.smp_contract.run")
MODEL = (
    *("--model_type=llama_v2", "--hidden_width=64", "--num_layers=2", "--num_heads=4"),
    *("--num_key_value_heads=2", "--intermediate_size=96", "--vocab_size=64", "--bf16=0"),
    *("--max_context_width=32", "--lr=3e-3", "--lr_decay_iters=100", "--train_batch_size=2"),
    "--sharding_strategy=full_shard",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Lines with as many tokens as a sequence, so that both ways count the same targets."""
    folder = tmp_path_factory.mktemp("data")
    rows = [[(start + place) % 64 for place in range(32)] for start in range(50)]
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * 32}) for row in rows]
    (folder / "a.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return f"--training_dir={folder}"


def train(folder: Path, *flags: str, program: Any = PROGRAM) -> tuple[str, list[dict[str, Any]]]:
    """Train on two ranks; returns the output, and the calls of rank 1."""
    before = (f"{folder}.calls",) if program == PROGRAM else ()
    done = run(2, *before, *MODEL, f"--checkpoint_dir={folder}", *flags, program=program)
    assert done.returncode == 0, done.stderr
    calls = Path(f"{folder}.calls.1")
    return done.stdout, json.loads(calls.read_text()) if calls.exists() else []


@pytest.mark.processes
def test_a_run_and_its_resumption(tmp_path: Path, data: str) -> None:
    import transformers  # noqa: F401  (what the library takes its models from)

    flags = (data, "--checkpoint_freq=2", "--grad_clip=0.5", "--use_smp_implementation=1")
    shown, calls = train(tmp_path / "run", *flags, "--max_steps=4")
    whole = losses(tmp_path / "run")
    assert "is not installed" not in shown
    assert "fp8: off, as blocks are recomputed" in shown
    assert calls[0] == {
        "call": "init",
        "config": {
            "tensor_parallel_degree": 1,
            "sm_activation_offloading": False,
            "activation_loading_horizon": 2,
            "random_seed": 12345,
        },
    }
    assert calls[1] == {"call": "transform", "load_state_dict_from_rank0": False}
    assert Counter(one["call"] for one in calls) == {
        **{"init": 1, "transform": 1, "DelayedParamIniter": 1, "clip_grad_norm_": 4}
    }
    assert calls[-1]["max_norm"] == 0.5
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4_ckp")
    shown, _ = train(tmp_path / "run", *flags, "--max_steps=4")
    assert "step_2_ckp at step 2" in shown
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2, 3, 4]
    assert losses(tmp_path / "run") == whole and whole[-1] < whole[0]


@pytest.mark.processes
def test_finetuning_gives_the_losses_of_the_native_way(tmp_path: Path, data: str) -> None:
    import transformers  # noqa: F401  (what the library takes its models from)

    native = ("-m", "training.llama_smp")
    train(tmp_path / "begin", data, "--max_steps=2", "--save_final_model=1", program=native)
    folder = tmp_path / "begin" / "model"
    flags = (data, f"--hf_pretrained_model_name_or_dir={folder}", "--max_steps=3", "--epochs=9")
    train(tmp_path / "native", *flags, program=native)
    _, calls = train(tmp_path / "smp", *flags, "--use_smp_implementation=1")
    assert calls[1] == {"call": "transform", "load_state_dict_from_rank0": True}
    assert calls[2] == {"call": "DelayedParamIniter"}, "rank 1 begins empty"
    assert losses(tmp_path / "smp") == pytest.approx(losses(tmp_path / "native"), abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((), "only the library's own layers have it"),
        (("--use_smp_implementation=1",), "blocks are recomputed"),
        (("--use_smp_implementation=1", "--activation_checkpointing=0"), "this is not a GPU"),
    ],
)
def test_float8_is_reported_to_be_off(flags: tuple[str, ...], shown: str) -> None:
    given = ("--backend=smp", "--use_synthetic_data=1", "--checkpoint_dir=/x", *flags)
    assert limits.fp8_obstacle(configure(given), torch.device("cpu")).startswith(shown)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--cpu_offload=1",), "cpu_offload: backend=smp has none"),
        (("--use_torch_compile=1",), "use_torch_compile: backend=smp has none"),
        (("--fsdp_engine=fsdp2",), "fsdp_engine: the library uses FSDP1"),
        (("--shard_degree=3",), "shard_group_size: 4 ranks cannot be cut into groups of 3"),
        (("--tensor_parallel_degree=3",), "tensor_parallel: 4 ranks cannot be cut into groups"),
        (
            ("--save_final_model=1", "--use_smp_implementation=1"),
            "final_model_dir: checkpoints of the library's own layers have names of its own",
        ),
    ],
)
def test_what_the_library_does_not_do(flags: tuple[str, ...], shown: str) -> None:
    given = ("--backend=smp", "--use_synthetic_data=1", "--checkpoint_dir=/x", *flags)
    four = Group(0, 4, 4, torch.device("cpu"), None)
    with pytest.raises(RequestError) as error:
        limits.check(configure(given), four)
    assert shown in str(error.value)


def test_what_the_library_is_started_with() -> None:
    flags = (
        *("--backend=smp", "--use_synthetic_data=1", "--checkpoint_dir=/x", "--shard_degree=4"),
        *("--tensor_parallel_degree=2", "--offload_activations=1"),
        *("--activation_loading_horizon=3", "--fp8_amax_history_len=16", "--seed=7"),
    )
    config = configure(flags)  # gpt_neox, whose layers only the library shares
    assert config.parallel.smp_transform, "as ranks share each layer"
    assert config.parallel.fp8_amax_history_len == 16
    assert sagemaker.settings(config) == {
        "tensor_parallel_degree": 2,
        "hybrid_shard_degree": 4,
        "sm_activation_offloading": True,
        "activation_loading_horizon": 3,
        "random_seed": 7,
    }


@pytest.mark.processes
def test_without_the_library_it_is_reported(tmp_path: Path) -> None:
    flags = (*MODEL, "--use_synthetic_data=1", f"--checkpoint_dir={tmp_path}", "--backend=smp")
    with pytest.raises(RequestError, match=r"backend: smp needs the library torch.sagemaker"):
        sagemaker.library()
    done = run(0, *flags, program=("-m", "training.llama_smp"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: backend: smp needs the library torch.sagemaker")
