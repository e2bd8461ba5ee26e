"""Whole training steps on one GPU: tokens a second, MFU and peak memory, beside the references.

usage: python -m benchmarks.throughput [--models NAME ...] [--steps 20] [--output FILE.json]

Each model of ours, and beside it the one that its users would take instead, with the same weights'
sizes, data, optimizer (fused AdamW) and precision (bfloat16 with float32 master weights, by
autocast for the reference): mamba-ssm's own model class for Mamba and Mamba-2, transformers'
for Llama. Every pair runs in the same process, one after the other, ours first; the first steps do
not count; a step's time is the median. The loss curves stand beside each other in the result.
MFU is by training.trainer.flops; recomputation counts for nothing.

Without a GPU the tiny models run on the CPU, to try the benchmark itself: that is no result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.config.config import ParallelConfig
from training.models import LlamaConfig, Sizes, preset
from training.parallel import fsdp
from training.process_group import Group, start, stop
from training.trainer import flops
from training.trainer.metrics import device_name

LENGTH = 4096
SKIPPED = 3  # first steps, which compile and tune


@dataclass(frozen=True)
class Run:
    """One training: which model, how many sequences in a step, which blocks are recomputed."""

    name: str
    batch: int
    recompute: int = 0  # every N-th block; 0: none


RUNS = (
    Run("state-spaces/mamba-370m", 8),
    Run("state-spaces/mamba-1.4b", 4, recompute=1),
    Run("state-spaces/mamba-2.8b", 2, recompute=1),
    Run("state-spaces/mamba2-2.7b", 2, recompute=1),
    Run("llama2-7b", 1, recompute=1),
)
TINY = (Run("mamba-tiny", 2), Run("mamba2-tiny", 2), Run("llama-tiny", 2, recompute=1))


@dataclass(frozen=True)
class Measured:
    """What one training did."""

    who: str
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int | None
    losses: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], help="[default: all]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    unknown = set(given.models) - {run.name for run in (*RUNS, *TINY)}
    if unknown:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    result = compare(given.steps, given.models)
    if given.output:
        given.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def compare(steps: int = 20, names: list[str] | None = None) -> dict[str, Any]:
    """Measure every pair that this machine can run."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    if not on_gpu:
        print("no GPU: tiny models, to try the benchmark; this is no result", flush=True)
    length = LENGTH if on_gpu else 128
    rows = []
    group = start(device.type)
    for run in RUNS if on_gpu else TINY:
        if names and run.name not in names:
            continue
        pair = [measured(run, ours(run, group), "ours", steps, length, device)]
        reference = reference_of(run.name)
        if reference is not None:
            pair.append(measured(run, reference[1], reference[0], steps, length, device))
        rows.append({**asdict(run), "length": length, "trainings": [asdict(one) for one in pair]})
        for one in pair:
            print(line(run, one), flush=True)
    stop()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return {"device": name, "is_result": on_gpu, "versions": versions, "runs": rows}


def line(run: Run, one: Measured) -> str:
    mfu = f", MFU {one.mfu:.0%}" if one.mfu is not None else ""
    memory = f", {one.peak_bytes / 2**30:.1f} GiB" if one.peak_bytes is not None else ""
    losses = f"loss {one.losses[0]:.3f} -> {one.losses[-1]:.3f}"
    return f"{run.name}, {one.who}: {one.tokens_per_second:,.0f} tokens/s{mfu}{memory}, {losses}"


Step = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[torch.device], tuple[nn.Module, Step]]


def measured(
    run: Run, make: Make, who: str, steps: int, length: int, device: torch.device
) -> Measured:
    """Train on one random text, over and over, and measure."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, loss_of = make(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=on_gpu)
    random = torch.Generator().manual_seed(0)
    vocabulary = preset(run.name).vocab_size
    tokens = torch.randint(vocabulary, (run.batch, length + 1), generator=random)  # (b, l + 1)
    tokens = tokens.to(device)  # (b, l + 1)
    times, losses = [], []
    for _ in range(SKIPPED + steps):
        since = time.perf_counter()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])  # ()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(round(loss.item(), 4))  # waits for the device
        times.append(time.perf_counter() - since)
    rate = run.batch * length / statistics.median(times[SKIPPED:])
    peak = flops.peak(device_name(device))
    work = flops.per_token(preset(run.name), length)
    return Measured(
        who=who,
        tokens_per_second=round(rate, 1),
        mfu=None if peak is None else rate * work / peak,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        losses=losses,
    )


def ours(run: Run, group: Group) -> Make:
    """Our model as training makes it: FSDP over one rank, float32 master weights."""

    def make(device: torch.device) -> tuple[nn.Module, Step]:
        config = ParallelConfig(
            fsdp_activation_checkpointing=bool(run.recompute),
            selective_checkpointing=max(1, run.recompute),
            low_cpu_fsdp=True,
        )
        model = fsdp.build(preset(run.name), config, group, seed=1)
        return model, model

    return make


def reference_of(name: str) -> tuple[str, Make] | None:
    """The model that others would train: its name and how it is made; None where it is not here."""
    sizes = preset(name)
    if isinstance(sizes, LlamaConfig):
        return "transformers", _transformers_llama(sizes)
    if torch.cuda.is_available():
        try:
            import mamba_ssm  # noqa: F401
        except ImportError:
            return None
        return "mamba-ssm", _mamba_ssm(sizes)
    return None


def _transformers_llama(sizes: LlamaConfig) -> Make:
    def make(device: torch.device) -> tuple[nn.Module, Step]:
        from transformers import LlamaConfig as TheirConfig
        from transformers import LlamaForCausalLM

        config = TheirConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.d_model,
            intermediate_size=sizes.d_ff,
            num_hidden_layers=sizes.n_layer,
            num_attention_heads=sizes.n_head,
            num_key_value_heads=sizes.n_kv_head,
            rms_norm_eps=sizes.norm_eps,
            max_position_embeddings=max(sizes.context, LENGTH),
            use_cache=False,
        )
        with device:
            model = LlamaForCausalLM(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=inputs).logits  # (b, l, v)
            return _cross_entropy(logits, targets)  # ()

        return model.train(), loss_of

    return make


def _mamba_ssm(sizes: Sizes) -> Make:
    def make(device: torch.device) -> tuple[nn.Module, Step]:
        from mamba_ssm.models.config_mamba import MambaConfig as TheirConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        layer = {"ssm_cfg": {"layer": "Mamba2"}} if sizes.family == "mamba2" else {}
        config = TheirConfig(
            d_model=sizes.d_model, n_layer=sizes.n_layer, vocab_size=sizes.vocab_size, **layer
        )
        model = MambaLMHeadModel(config, device=device, dtype=torch.float32)

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(inputs).logits  # (b, l, v)
            return _cross_entropy(logits, targets)  # ()

        return model.train(), loss_of

    return make


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).float()  # (b l, v)
    return nn.functional.cross_entropy(flat, targets.flatten())  # ()


if __name__ == "__main__":
    sys.exit(main())
