"""The entry point for SMP v2: its program's flags, each honored or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support.runs import ROOT
from training import models
from training.errors import RequestError
from training.llama_smp import configure
from training.models import LlamaConfig, MistralConfig, MixtralConfig, NeoXConfig
from training.systems.smp.flags import FLAGS

LEAST = ("--use_synthetic_data=1", "--checkpoint_dir=/x")
LAUNCHED = (
    *("--train_batch_size", "4", "--max_steps", "100", "--hidden_width", "8192"),
    *("--num_layers", "80", "--num_heads", "64", "--llama_intermediate_size", "28672"),
    *("--shard_degree", "64", "--model_type", "llama_v2", "--profile_nsys", "1"),
    *("--use_smp_implementation", "1", "--max_context_width", "4096"),
    *("--tensor_parallel_degree", "1", "--use_synthetic_data", "1"),
    *("--training_dir", "/fsx/path_to_data", "--test_dir", "/fsx/path_to_data"),
    *("--dataset_type", "hf", "--checkpoint_dir", "/fsx/checkpoints", "--checkpoint_freq", "100"),
)
PROGRAM = """
    train_batch_size max_steps epochs seed same_seed bf16 fp8 fp8_amax_history_len
    fp8_amax_compute_algo grad_clip weight_decay beta1 beta2 lr lr_decay_style lr_decay_iters min_lr
    warmup plateau activation_checkpointing offload_activations activation_loading_horizon
    patch_neox_rope delayed_param enable_memory_profiling clean_cache logging_freq
    logging_freq_for_avg log_reduced_training_loss tensorboard_dir num_kept_checkpoints
    checkpoint_freq checkpoint_dir resume_from_checkpoint checkpoint_type model_dir save_final_model
    dataset_type data_num_workers data_type use_synthetic_data zipped_data training_dir test_dir
    hf_pretrained_model_name_or_dir max_context_width vocab_size hidden_width num_layers num_heads
    resid_pdrop embd_pdrop attn_pdrop summary_first_pdrop initializer_range model_type rotary_pct
    rotary_emb_base use_smp_flash_attn llama_intermediate_size intermediate_size sliding_window
    num_key_value_heads num_experts_per_tok num_local_experts use_smp_implementation
    tensor_parallel_degree limit_all_gathers forward_prefetch sharding_strategy use_orig_params
    shard_degree backward_fetch_policy auto_wrap_policy validation_freq validation_batches
    preserve_np_state fast_validation val_batch_size distributed_backend nccl_test_log profile_nsys
    framework finetune pretrained_model_name pretrained_checkpoint_file finetune_checkpoint_load_dir
"""


def parameters(*flags: str) -> int:
    with torch.device("meta"):
        model = models.build(configure((*LEAST, *flags)).model.sizes)
    return sum(one.numel() for one in model.parameters())


def test_every_flag_of_the_program_is_there_once() -> None:
    names = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    assert sorted(set(PROGRAM.split()) - set(names)) == []


def test_the_launchers_command_line() -> None:
    config = configure(LAUNCHED)
    data, run, optim, parallel = config.data, config.run, config.optim, config.parallel
    sizes: Any = config.model.sizes
    assert (sizes.d_model, sizes.n_layer, sizes.d_ff, sizes.vocab_size) == (8192, 80, 28672, 50432)
    assert (data.dataset_path, data.eval_dataset_path) == ("synthetic:", "")
    assert (data.seq_length, data.batch_size, data.epochs) == (4096, 4, 3)
    assert run.save_ckpt_path == "/fsx/checkpoints" and run.load_ckpt_path == ""
    assert (run.num_steps, run.checkpoint_interval, run.keep_checkpoints) == (100, 100, 2)
    assert (run.report_interval, run.average_interval, run.seed) == (1, 50, 12345)
    assert run.use_nsight and not run.track_memory
    schedule = optim.schedule
    assert (optim.learning_rate, optim.weight_decay, optim.grad_clip_thresh) == (1e-4, 0.2, 1.0)
    assert (schedule.name, schedule.warmup, schedule.lr_decay_iters) == ("cosine", 0.0032, 47683)
    assert (parallel.sharding_strategy, parallel.shard_group_size) == ("hsdp", 64)
    assert (parallel.precision, parallel.fp8, parallel.tensor_parallel) == ("auto", True, 1)
    assert parallel.low_cpu_fsdp and parallel.fsdp_activation_checkpointing
    assert parallel.forward_prefetch and parallel.limit_all_gathers


def test_data_beside_made_up_data_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The system's launcher has both; somebody who has named data may not want noise."""
    with caplog.at_level("INFO", "training"):
        configure(LAUNCHED)
    warning = "WARNING: use_synthetic_data: trains on random tokens, and /fsx/path_to_data is not "
    assert f"{warning}read; fix: leave use_synthetic_data out to train on it" in caplog.messages
    caplog.clear()
    with caplog.at_level("INFO", "training"):
        configure(LEAST)
    assert not any("use_synthetic_data" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("flags", "count", "degree"),
    [
        (("--model_type=llama_v2", "--model_size=7b"), 6_738_415_616, 8),
        (("--model_type=llama_v2", "--model_size=13b"), 13_015_864_320, 64),
        (("--model_type=llama_v2", "--model_size=70b"), 68_976_648_192, 64),
        (("--model_size=20b",), 20_554_567_680, 64),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_model_sizes(flags: tuple[str, ...], count: int, degree: int) -> None:
    config = configure((*LEAST, *flags))
    assert parameters(*flags) == count
    assert config.parallel.shard_group_size == degree
    own = configure((*LEAST, *flags, "--num_layers=3", "--vocab_size=99", "--shard_degree=2"))
    assert (own.model.sizes.n_layer, own.model.sizes.vocab_size) == (3, 99)
    assert own.model.sizes.d_model == config.model.sizes.d_model
    assert own.parallel.shard_group_size == 2


@pytest.mark.parametrize(
    ("flags", "kind", "sizes"),
    [
        ((), NeoXConfig, {"d_model": 768, "n_layer": 12, "vocab_size": 50432, "rotary_pct": 0.25}),
        (("--model_type=llama_v2",), LlamaConfig, {"d_ff": 11008, "n_kv_head": 12}),
        (("--model_type=mistral",), MistralConfig, {"d_ff": 14336, "window": 4096}),
        (
            ("--model_type=mixtral", "--num_local_experts=4", "--num_experts_per_tok=1"),
            MixtralConfig,
            {"n_expert": 4, "top_k": 1, "d_ff": 14336},
        ),
    ],
    ids=["gpt_neox", "llama_v2", "mistral", "mixtral"],
)
def test_model_types(flags: Any, kind: Any, sizes: dict[str, Any]) -> None:
    found = configure((*LEAST, *flags)).model.sizes
    assert type(found) is kind
    assert {name: getattr(found, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("flags", "strategy", "group", "reshard"),
    [
        ((), "hsdp", 0, True),
        (("--shard_degree=0",), "hsdp", 0, True),
        (("--sharding_strategy=no_shard",), "ddp", 0, True),
        (("--sharding_strategy=full_shard",), "fsdp", 0, True),
        (("--sharding_strategy=shard_grad_op",), "fsdp", 0, False),
        (("--sharding_strategy=_hybrid_shard_zero2", "--shard_degree=4"), "hsdp", 4, False),
        (("--sharding_strategy=full_shard", "--shard_degree=4"), "hsdp", 4, True),
        (("--hybrid_shard_degree=1",), "hsdp", 1, True),
        # A size implies the degree of hybrid sharding; other strategies are left as they are.
        (("--model_size=7b",), "hsdp", 8, True),
        (("--model_size=7b", "--sharding_strategy=_hybrid_shard_zero2"), "hsdp", 8, False),
        (("--model_size=7b", "--sharding_strategy=full_shard"), "fsdp", 0, True),
        (("--model_size=7b", "--sharding_strategy=shard_grad_op"), "fsdp", 0, False),
        (("--model_size=7b", "--sharding_strategy=no_shard"), "ddp", 0, True),
        (
            ("--model_size=7b", "--sharding_strategy=full_shard", "--shard_degree=4"),
            "hsdp",
            4,
            True,
        ),
        # A degree counts ranks that read data: tensor groups.
        (
            ("--shard_degree=4", "--tensor_parallel_degree=2", "--model_type=llama_v2"),
            "hsdp",
            8,
            True,
        ),
    ],
)
def test_sharding(flags: tuple[str, ...], strategy: str, group: int, reshard: bool) -> None:
    parallel = configure((*LEAST, *flags)).parallel
    found = parallel.sharding_strategy, parallel.shard_group_size, parallel.reshard_after_forward
    assert found == (strategy, group, reshard)


@pytest.mark.parametrize(
    ("flags", "train", "test"),
    [
        (("--training_dir=/d",), "lines:/d/*.json.gz", ""),
        (("--training_dir=/d", "--zipped_data=0"), "lines:/d/*.json", ""),
        (("--training_dir=/d/c4*.json",), "lines:/d/c4*.json", ""),
        (("--training_dir=/d", "--dataset_type=hf"), "/d", ""),
        (("--training_dir=text:/d/*.py",), "text:/d/*.py", ""),
        (("--training_dir=/d", "--test_dir=/t"), "lines:/d/*.json.gz", "lines:/t/*.json.gz"),
        (
            ("--training_dir=/d", "--test_dir=/t", "--dataset_type=hf", "--validation_freq=5"),
            "/d",
            "/t",
        ),
    ],
)
def test_data(flags: tuple[str, ...], train: str, test: str) -> None:
    data = configure(("--checkpoint_dir=/x", *flags)).data
    assert (data.dataset_path, data.eval_dataset_path) == (train, test)
    assert data.eval_batch_size == (4 if test else 0)


@pytest.mark.processes
def test_the_folders_that_sagemaker_names(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from training.llama_smp import configure; import sys;"
        "data = configure(sys.argv[1:]).data; print(data.dataset_path, data.eval_dataset_path)"
    )
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/opt/train")
    monkeypatch.setenv("SM_CHANNEL_TEST", "/opt/test")
    shown = [
        subprocess.run(
            [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        for flags in ((), ("--validation_freq=5",))
    ]
    assert shown == [
        "lines:/opt/train/*.json.gz \n",
        shown[0].strip() + " lines:/opt/test/*.json.gz\n",
    ]


def test_what_training_sees_is_not_validated_on(tmp_path: Path) -> None:
    train, test = tmp_path / "train", tmp_path / "test"
    train.mkdir()
    test.mkdir()
    (train / "a.json.gz").touch()
    (test / "b.json.gz").touch()
    flags = ("--checkpoint_dir=/x", f"--training_dir={train}", "--validation_freq=5")
    configure((*flags, f"--test_dir={test}"))
    for other in (train, f"{test}/../train/"):
        with pytest.raises(RequestError, match=r"^--test_dir: .* which training sees"):
            configure((*flags, f"--test_dir={other}"))
        with pytest.raises(RequestError, match=r"^--test_dir: .* which training sees"):
            configure((*flags, f"--test_dir={other}", "--dataset_type=hf"))
    (test / "c.json.gz").symlink_to(train / "a.json.gz")
    with pytest.raises(RequestError, match=r"^--test_dir: "):
        configure((*flags, f"--test_dir={test}"))
    (train / "dataset_dict.json").touch()  # for training and validation
    configure((*flags, f"--test_dir={train}", "--dataset_type=hf"))


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--model_type=gpt2",), "--model_type: must be one of llama_v2, llama_v3, mistral"),
        (("--sharding_strategy=zero3",), "--sharding_strategy: must be one of hybrid_shard"),
        (("--backend=neuron",), "--backend: must be one of fsdp, smp, not 'neuron'"),
        (("--framework=ddp",), "--framework: 'ddp' is refused: there is fsdp only"),
        (("--distributed_backend=smddp",), "'smddp' is refused: ranks talk by nccl on GPUs"),
        (("--data_type=bert",), "--data_type: 'bert' is refused: there is gpt only"),
        (("--nccl_test_log=/x",), "--nccl_test_log: '/x' is refused: no log of a network test is"),
        (
            ("--auto_wrap_policy=size_based_auto_wrap_policy",),
            "--auto_wrap_policy: 'size_based_auto_wrap_policy' is refused: a block is",
        ),
        (("--use_orig_params=0",), "--use_orig_params: False is refused: parameters always keep"),
        (("--use_smp_flash_attn=0",), "--use_smp_flash_attn: False is refused: attention is the"),
        (("--fp8_amax_history_len=512",), "fp8_amax_history_len: backend=fsdp ignores it"),
        (("--log_reduced_training_loss=0",), "--log_reduced_training_loss: False is refused: "),
        (("--fast_validation=0",), "--fast_validation: False is refused: validation reads"),
        (("--checkpoint_type=use_pg_with_util",), "'use_pg_with_util' is refused: checkpoints"),
        (("--checkpoint_type=local",), "--checkpoint_type: 'local' is refused: checkpoints are"),
        (("--patch_neox_rope=0",), "--patch_neox_rope: False is refused: the models here have"),
        (("--model_size=8b",), "--model_size: gpt_neox has 7b, 13b, 20b, 65b, not '8b'"),
        (("--model_type=llama_v2", "--model_size=65b"), "--model_size: llama_v2 has 7b, 13b, 70b"),
        (("--model_type=mixtral", "--model_size=7b"), "--model_size: mixtral has none"),
        (("--model_type=llama_v2", "--summary_first_pdrop=.1"), "--summary_first_pdrop: llama_v2"),
        (("--num_local_experts=4",), "--num_local_experts: gpt_neox has none"),
        (("--shard_degree=-1",), "--shard_degree: must be from 0 to the number of ranks, not -1"),
        (("--tensor_parallel_degree=2",), "tensor_parallel_degree: 2 ranks cannot share a layer"),
        (
            ("--checkpoint_freq", "100", "200"),
            "--checkpoint_freq: takes one value, but 2 are given",
        ),
        (("--num_kept_checkpoints", "1", "2", "3"), "--num_kept_checkpoints: takes one value"),
        (("--zipped_data=1",), "--zipped_data: random tokens have no files; fix: leave it out"),
        (("--model_dir=/m",), "--model_dir: has no effect without save_final_model"),
        (
            ("--save_final_model=1", "--checkpoint_dir=s3://bucket/run"),
            "--model_dir: must be given with save_final_model: s3://bucket/run takes checkpoints "
            "alone, and the folder for temporary files is lost; fix: give a folder, or "
            "checkpoint_scratch",
        ),
        (("--activation_loading_horizon=4",), "activation_loading_horizon: only offload_activat"),
        (("--plateau=.1",), "plateau: schedule=cosine does not take it"),
        (
            ("--finetune=1",),
            "--finetune: there is nothing to start from; fix: give pretrained_model_name with "
            "finetune_checkpoint_",
        ),
        (
            ("--pretrained_model_name=m",),
            "--pretrained_model_name: has no effect without --finetune 1",
        ),
        (
            ("--finetune=1", "--pretrained_model_name=m"),
            "--finetune_checkpoint_load_dir: must be given with pretrained_model_name",
        ),
        (
            ("--finetune=1", "--pretrained_checkpoint_file=/nowhere/a.bin"),
            "--pretrained_checkpoint_file: /nowhere/a.bin does not exist",
        ),
        (("--max_step=3",), "there is no such flag; did you mean --max_steps?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input(flags: tuple[str, ...], shown: str) -> None:
    with pytest.raises(RequestError) as error:
        configure((*LEAST, *flags))
    assert shown in str(error.value)


def test_data_must_be_given() -> None:
    with pytest.raises(RequestError) as error:
        configure(("--checkpoint_dir=/x", "--validation_freq=2", "--use_orig_params=1"))
    assert "--training_dir: must be given (or SM_CHANNEL_TRAIN)" in str(error.value)
    with pytest.raises(RequestError) as error:
        configure(("--checkpoint_dir=/x", "--validation_freq=2", "--training_dir=/d"))
    assert "--test_dir: must be given (or SM_CHANNEL_TEST) with validation_freq" in str(error.value)


def test_the_final_model_of_a_run_at_a_url_is_in_a_folder_that_lasts() -> None:
    flags = (*LEAST, "--save_final_model=1", "--checkpoint_dir=s3://bucket/run")
    assert configure((*flags, "--model_dir=/m")).run.final_model_dir == "/m"
    run = configure((*flags, "--checkpoint_scratch=/fsx/run")).run
    assert (run.mirror_url, run.final_model_dir) == ("s3://bucket/run", "/fsx/run/model")


def test_values_that_ask_for_what_is_done_anyway() -> None:
    flags = (
        *("--framework=fsdp", "--distributed_backend=nccl", "--data_type=gpt"),
        *("--use_orig_params=1", "--patch_neox_rope=1", "--use_smp_flash_attn=1"),
        *("--log_reduced_training_loss=1", "--preserve_np_state=0", "--fast_validation=1"),
        *("--auto_wrap_policy=transformer_auto_wrap_policy", "--checkpoint_type=sharded"),
    )
    assert configure((*LEAST, *flags)) == configure(LEAST)


SETTINGS = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 257,
}


def test_a_pretrained_models_config_gives_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    by_name = (
        "--finetune=1",
        f"--pretrained_model_name={tmp_path}",
        f"--finetune_checkpoint_load_dir={tmp_path}",
    )
    for flags in (by_name, (f"--hf_pretrained_model_name_or_dir={tmp_path}",)):
        model = configure((*LEAST, *flags, "--hidden_width=64", "--model_type=llama_v2")).model
        sizes: Any = model.sizes
        assert (sizes.n_kv_head, sizes.d_ff, sizes.vocab_size) == (2, 96, 257)
        assert model.init_weights == str(tmp_path) and model.init_hub == ""
        with pytest.raises(RequestError) as error:
            configure((*LEAST, *flags, "--hidden_width=32", "--rotary_pct=.5", "--model_size=7b"))
        assert str(error.value).startswith("3 faults")
        for shown in (
            "--hidden_width: the pretrained model has 64, not 32; fix: leave it out",
            "--rotary_pct: the pretrained model is llama, which has none, not 0.5",
            "--model_size: the pretrained model has its own sizes; fix: leave it out",
        ):
            assert shown in str(error.value)
