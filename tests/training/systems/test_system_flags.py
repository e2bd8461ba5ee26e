"""Each flag of the known systems' programs, as their users write it, and what it sets here.

The pages of docs/training/systems/ describe them and name these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pytest

from training import llama_fsdp, llama_smp, mamba2_neuron, mamba_fsdp
from training.config.config import Config
from training.errors import RequestError
from training.systems.smp.flags import names_for

Rows = tuple[tuple[str, str, Any], ...]

MAMBA_FSDP: Rows = (
    ("--model_name=state-spaces/mamba-2.8b", "model.sizes.d_model", 2560),
    ("--model_name=state-spaces/mamba-2.8b-hf", "model.sizes.d_model", 2560),
    ("--model_variant=mamba_9.8b", "model.sizes.pattern", "MMMMMMMMM*MMMMMMMM*MMMMMMMM*MMMM"),
    ("--model_name=granite-4.0-h-tiny", "model.sizes.n_expert", 64),
    ("--model_name=nemotron-h-8b", "model.sizes.n_layer", 52),
    ("--vocab_size=64", "model.sizes.vocab_size", 64),
    ("--dataset_path=/fsx/set", "data.dataset_path", "/fsx/set"),
    ("--load_ckpt_path=/l", "run.load_ckpt_path", "/l"),
    ("--ckpt_load_path=/l", "run.load_ckpt_path", "/l"),
    ("--save_ckpt_path=/s", "run.save_ckpt_path", "/s"),
    ("--ckpt_save_path=/s", "run.save_ckpt_path", "/s"),
    ("--fsdp_activation_checkpointing=True", "parallel.fsdp_activation_checkpointing", True),
    ("--fsdp_activation_checkpointing=False", "parallel.fsdp_activation_checkpointing", False),
    ("--sharding_strategy=fsdp", "parallel.sharding_strategy", "fsdp"),
    ("--sharding_strategy=hsdp", "parallel.sharding_strategy", "hsdp"),
    ("--sharding_strategy=ddp", "parallel.sharding_strategy", "ddp"),
    ("--low_cpu_fsdp=True", "parallel.low_cpu_fsdp", True),
    ("--batch_size=3", "data.batch_size", 3),
    ("--seq_length=2048", "data.seq_length", 2048),
    ("--learning_rate=1e-3", "optim.learning_rate", 1e-3),
    ("--grad_clip_thresh=2.0", "optim.grad_clip_thresh", 2.0),
    ("--num_steps=1200", "run.num_steps", 1200),
    ("--report_interval=50", "run.report_interval", 50),
    ("--checkpoint_interval=300", "run.checkpoint_interval", 300),
    ("--use_torch_compile=True", "parallel.use_torch_compile", True),
    ("--use_profiler=True", "run.use_profiler", True),
    ("--use_nsight=True", "run.use_nsight", True),
    ("--use_wandb=True", "run.use_wandb", True),
    ("--use_wandb --wandb_dir=/w", "run.wandb_dir", "/w"),
    ("--use_wandb --wandb_project=p", "run.wandb_project", "p"),
    ("--use_wandb --wandb_run_id=aabbccdd", "run.wandb_run_id", "aabbccdd"),
    ("", "data.reset_documents", False),
    ("--reset_documents", "data.reset_documents", True),
    ("--seed=7", "run.seed", 7),
    ("--precision=bf16", "parallel.precision", "bf16"),
    (
        "--fsdp_activation_checkpointing=True --selective_checkpointing=2",
        "parallel.selective_checkpointing",
        2,
    ),
)

LLAMA: Rows = (
    ("--train_batch_size=3", "data.batch_size", 3),
    ("--max_steps=100", "run.num_steps", 100),
    ("--max_training_steps=100", "run.num_steps", 100),
    ("--epochs=2", "data.epochs", 2),
    ("--seed=7", "run.seed", 7),
    ("--same_seed=1", "run.same_seed", True),
    ("--bf16=1", "parallel.precision", "bf16"),
    ("--bf16=0", "parallel.precision", "fp32"),
    ("--grad_clip=0.5", "optim.grad_clip_thresh", 0.5),
    ("--weight_decay=0.1", "optim.weight_decay", 0.1),
    ("--beta1=0.8", "optim.beta1", 0.8),
    ("--beta2=0.99", "optim.beta2", 0.99),
    ("--lr=2e-4", "optim.learning_rate", 2e-4),
    *(
        (f"--lr_decay_style={name}", "optim.schedule.name", name)
        for name in ("cosine", "constant", "linear", "exponential", "plateau")
    ),
    ("--lr_decay_iters=900", "optim.schedule.lr_decay_iters", 900),
    ("--min_lr=1e-6", "optim.schedule.min_lr", 1e-6),
    ("--warmup=0.01", "optim.schedule.warmup", 0.01),
    ("--lr_decay_style=plateau --plateau=0.2", "optim.schedule.plateau", 0.2),
    ("--activation_checkpointing=0", "parallel.fsdp_activation_checkpointing", False),
    ("--offload_activations=1", "parallel.offload_activations", True),
    (
        "--offload_activations=1 --activation_loading_horizon=4",
        "parallel.activation_loading_horizon",
        4,
    ),
    ("--limit_all_gathers=0", "parallel.limit_all_gathers", False),
    ("--logging_freq=5", "run.report_interval", 5),
    ("--tensorboard_dir=/tb", "run.tensorboard_dir", "/tb"),
    ("--checkpoint_freq=300", "run.checkpoint_interval", 300),
    ("--checkpoint_dir=/c", "run.save_ckpt_path", "/c"),
    ("--resume_from_checkpoint=/r", "run.load_ckpt_path", "/r"),
    ("--max_context_width=4096", "data.seq_length", 4096),
    ("", "data.reset_documents", False),
    ("--reset_documents=True", "data.reset_documents", True),
    ("--reset_documents=auto", "data.reset_documents", None),
    ("--vocab_size=64", "model.sizes.vocab_size", 64),
    ("--hidden_width=1024 --num_heads=16", "model.sizes.d_model", 1024),
    ("--num_layers=3", "model.sizes.n_layer", 3),
    ("--num_heads=6", "model.sizes.n_head", 6),
    ("--initializer_range=0.01", "model.sizes.initializer_range", 0.01),
    *(
        (f"--model_type={name}", "model.sizes.family", family)
        for name, family in (
            *(("llama_v2", "llama"), ("llama_v3", "llama"), ("mistral", "mistral")),
            *(("mixtral", "mixtral"), ("gpt_neox", "gpt_neox")),
        )
    ),
    ("--rotary_pct=0.5", "model.sizes.rotary_pct", 0.5),
    ("--rotary_emb_base=5000", "model.sizes.rope_theta", 5000),
    ("--resid_pdrop=0 --embd_pdrop=0", "model.sizes.hidden_dropout", 0),
    ("--attn_pdrop=0", "model.sizes.attention_dropout", 0),
    ("--model_type=llama_v2 --num_key_value_heads=4", "model.sizes.n_kv_head", 4),
    ("--model_type=llama_v2 --intermediate_size=64", "model.sizes.d_ff", 64),
    ("--model_type=llama_v2 --llama_intermediate_size=64", "model.sizes.d_ff", 64),
    ("--model_type=mistral --sliding_window=64", "model.sizes.window", 64),
)
"""What the two programs for Llama share."""

LLAMA_FSDP: Rows = (
    *LLAMA,
    ("--sharding_strategy=full", "parallel.sharding_strategy", "fsdp"),
    ("--sharding_strategy=hybrid", "parallel.sharding_strategy", "hsdp"),
    ("--cpu_offload=1", "parallel.cpu_offload", True),
    ("--low_cpu_fsdp=0", "parallel.low_cpu_fsdp", False),
    ("--dataset=c4", "data.dataset_path", "stream:allenai/c4"),
    ("--dataset_path=/fsx/set", "data.dataset_path", "/fsx/set"),
    ("--dataset=c4 --dataset_config_name=en", "data.dataset_config", "en"),
    ("--dataset=c4 --tokenizer=bytes", "data.tokenizer", "bytes"),
    ("--dataset=c4 --validation_freq=500", "run.eval_interval", 500),
    ("--dataset=c4 --validation_freq=5 --validation_batches=3", "data.eval_batches", 3),
    ("--dataset=c4 --validation_freq=5 --val_batch_size=2", "data.eval_batch_size", 2),
)

LLAMA_SMP: Rows = (
    *LLAMA,
    ("--fp8=0", "parallel.fp8", False),
    ("--backend=smp --fp8_amax_history_len=512", "parallel.fp8_amax_history_len", 512),
    (
        "--backend=smp --fp8_amax_compute_algo=most_recent",
        "parallel.fp8_amax_compute_algo",
        "most_recent",
    ),
    ("--delayed_param=0", "parallel.low_cpu_fsdp", False),
    ("--enable_memory_profiling=1", "run.track_memory", True),
    ("--clean_cache=1", "run.clean_cache", True),
    ("--logging_freq_for_avg=20", "run.average_interval", 20),
    ("--num_kept_checkpoints=3", "run.keep_checkpoints", 3),
    ("--save_final_model=1", "run.final_model_dir", "/x/model"),
    ("--save_final_model=1 --model_dir=/m", "run.final_model_dir", "/m"),
    ("--data_num_workers=2", "data.num_workers", 2),
    ("--use_synthetic_data=1", "data.dataset_path", "synthetic:"),
    ("--model_type=mixtral --num_local_experts=4", "model.sizes.n_expert", 4),
    ("--model_type=mixtral --num_experts_per_tok=1", "model.sizes.top_k", 1),
    (
        "--backend=smp --model_type=llama_v2 --tensor_parallel_degree=2",
        "parallel.tensor_parallel",
        2,
    ),
    ("--backend=smp --use_smp_implementation=1", "parallel.smp_transform", True),
    ("--forward_prefetch=0", "parallel.forward_prefetch", False),
    ("--backward_fetch_policy=backward_post", "parallel.backward_prefetch", "post"),
    ("--sharding_strategy=full_shard", "parallel.sharding_strategy", "fsdp"),
    ("--shard_degree=4", "parallel.shard_group_size", 4),
    ("--profile_nsys=1", "run.use_nsight", True),
    (
        "--use_synthetic_data=0 --training_dir=/d --test_dir=/t --validation_freq=5",
        "run.eval_interval",
        5,
    ),
    (
        "--use_synthetic_data=0 --training_dir=/d --test_dir=/t --validation_batches=3",
        "data.eval_batches",
        3,
    ),
    (
        "--use_synthetic_data=0 --training_dir=/d --test_dir=/t --val_batch_size=2",
        "data.eval_batch_size",
        2,
    ),
)

NEURON: Rows = (
    ("--data_dir ./data/wikicorpus_512/", "data.dataset_path", "./data/wikicorpus_512/"),
    *(
        (f"--model {name}", "model.sizes.d_model", width)
        for name, width in (
            *(("Mamba130M", 768), ("Mamba370M", 1024), ("Mamba780M", 1536)),
            *(("Mamba1B", 2048), ("Mamba3B", 2560), ("Mamba7B", 4096)),
        )
    ),
    ("--seed 7", "run.seed", 7),
    ("--dtype bfloat16", "parallel.precision", "bf16"),
    ("--dtype float32", "parallel.precision", "fp32"),
    ("--batch 2", "data.batch_size", 2),
    ("--vocab_size 50288", "model.sizes.vocab_size", 50288),
    ("--backend xla", "run.device", "xla"),
    ("--backend nccl", "run.device", "cuda"),
    ("--backend gloo", "run.device", "cpu"),
    ("--tp 4", "parallel.tensor_parallel", 4),
    ("--dtype bfloat16 --no_optimizer_fp32", "parallel.master_weights", False),
    ("--use_zero_1", "parallel.zero1", True),
    ("--lr 0.001", "optim.learning_rate", 0.001),
    ("--weight_decay 0.1", "optim.weight_decay", 0.1),
    ("--beta1 0.8", "optim.beta1", 0.8),
    ("--beta2 0.95", "optim.beta2", 0.95),
    ("--grad_clip 2.0", "optim.grad_clip_thresh", 2.0),
    ("--warmup_steps 5", "optim.schedule.warmup_steps", 5),
    ("--max_steps 16", "run.num_steps", 16),
    ("--grad_accum_usteps 4", "data.gradient_accumulation", 4),
    ("--rmsnorm_across_groups", "model.sizes.norm_across_groups", True),
    ("--checkpoint_freq 8", "run.checkpoint_interval", 8),
    ("--checkpoint_dir ./model_save/", "run.save_ckpt_path", "model_save/exp"),
    ("--checkpoint_dir /m --tag try", "run.save_ckpt_path", "/m/try"),
    ("--num_kept_checkpoint 3", "run.keep_checkpoints", 3),
    ("--num_kept_checkpoint -1", "run.keep_checkpoints", 0),
    (
        "--checkpoint_load --checkpoint_load_dir /l --checkpoint_load_tag t",
        "run.load_ckpt_path",
        "/l/t",
    ),
    ("--logging_interval 5", "run.report_interval", 5),
    ("--output_dir /tb", "run.tensorboard_dir", "/tb"),
    ("--seq_len 2048", "data.seq_length", 2048),
    ("", "data.reset_documents", False),
    ("--reset_documents True", "data.reset_documents", True),
    ("--d_model 256 --head_dim 64", "model.sizes.head_dim", 64),
    ("--n_layer 2", "model.sizes.n_layer", 2),
    ("--d_state 64", "model.sizes.d_state", 64),
    ("--n_groups 2", "model.sizes.n_groups", 2),
    ("--chunk_size 64", "model.sizes.chunk_size", 64),
    ("--tp 2 --groups_as_tp", "model.sizes.n_groups", 2),
)


def check(
    configure: Callable[[Sequence[str]], Config], least: str, words: str, where: str, value: Any
) -> None:
    made = configure([*least.split(), *words.split()])
    assert attrgetter(where)(made) == value


@pytest.mark.parametrize(("words", "where", "value"), MAMBA_FSDP)
def test_mamba_fsdp(words: str, where: str, value: Any) -> None:
    check(mamba_fsdp.configure, "--dataset_path=text:x --save_ckpt_path=/x", words, where, value)


@pytest.mark.parametrize(("words", "where", "value"), LLAMA_FSDP)
def test_llama_fsdp(words: str, where: str, value: Any) -> None:
    check(llama_fsdp.configure, "--checkpoint_dir=/x --dataset=text:x", words, where, value)


@pytest.mark.parametrize(("words", "where", "value"), LLAMA_SMP)
def test_llama_smp(words: str, where: str, value: Any) -> None:
    check(llama_smp.configure, "--use_synthetic_data=1 --checkpoint_dir=/x", words, where, value)


@pytest.mark.parametrize(("words", "where", "value"), NEURON)
def test_mamba2_neuron(words: str, where: str, value: Any) -> None:
    least = "--data_dir text:x --seq_len 128 --max_steps 9"
    check(mamba2_neuron.configure, least, words, where, value)


def test_no_flags_and_no_ranks_are_reported() -> None:
    assert names_for(()) == names_for(("--use_synthetic_data=1",))
    asked = ("--backend=gloo", "--data_dir=synthetic:", "--max_steps=1", "--seq_len=128", "--tp=0")
    with pytest.raises(RequestError, match="must be at least 1, not 0"):
        mamba2_neuron.configure(asked)


@pytest.mark.parametrize(
    ("kind", "flag", "shown"),
    [
        (
            "gpt_neox",
            "--resid_pdrop=1.5",
            "resid_pdrop: must be at least 0 and less than 1, not 1.5",
        ),
        (
            "gpt_neox",
            "--attn_pdrop=-.1",
            "attn_pdrop: must be at least 0 and less than 1, not -0.1",
        ),
        ("gpt_neox", "--rotary_emb_base=0", "rotary_emb_base: must be more than 0 and finite, "),
        ("llama_v2", "--rotary_emb_base=nan", "rotary_emb_base: must be more than 0 and finite, "),
        ("llama_v2", "--initializer_range=0", "initializer_range: must be more than 0 and finite"),
    ],
)
def test_numbers_of_a_model_are_called_as_the_flag_is(kind: str, flag: str, shown: str) -> None:
    for configure, least in (
        (llama_smp.configure, ("--use_synthetic_data=1", "--checkpoint_dir=/x")),
        (llama_fsdp.configure, ("--checkpoint_dir=/x", "--dataset=text:x")),
    ):
        with pytest.raises(RequestError) as error:
            configure((*least, f"--model_type={kind}", flag))
        assert str(error.value).startswith(shown)
