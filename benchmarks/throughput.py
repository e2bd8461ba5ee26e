"""Measure whole training steps on one GPU: tokens/s, MFU and peak memory, beside the references.

usage: python -m benchmarks.throughput [--models NAME ...] [--lengths N ...] [--steps 10]
                                       [--profile] [--output FILE.json]

Runs each of our models and the implementation that users would run otherwise, with the same sizes,
data, optimizer (fused AdamW) and precision (bfloat16 with float32 master weights, by autocast for
the reference): mamba-ssm's own model class for Mamba and Mamba-2, transformers' for Llama and the
hybrids. Both run in one process, one after the other, ours first; the first steps do not count; a
step's time is the median. The result lists the losses of both side by side.
MFU is computed by training.trainer.flops; recomputation does not count as work. --profile runs one
more step and lists the kernels that take the most time.

The runs fit a GPU of 141 GB; a run that does not fit the memory says so, and the others go on.
FILE.json is written after each model, so an interrupted benchmark keeps what it has measured.
Without a GPU the tiny models run on the CPU, to try the benchmark itself: that is no result.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.references import Make, Step, reference_of
from training.config.config import ParallelConfig
from training.convert.source import Source
from training.models import build, preset
from training.parallel import fsdp
from training.process_group import Group, start, stop
from training.trainer import flops
from training.trainer.metrics import device_name

SKIPPED = 3  # first steps, not counted: they compile and tune
KERNELS = 12  # the longest, which a profile lists


@dataclass(frozen=True)
class Run:
    """One training: a model, the sequences of a step, and the blocks to recompute.

    recompute: every N-th block of ours; 0: none. theirs: the same for the reference, whose autocast
    keeps a second copy of the weights for the backward pass, as ours does unless it reshards.
    """

    name: str
    batch: int
    length: int
    recompute: int = 0
    theirs: int = 0
    reshard: bool = False


RUNS = (
    Run("state-spaces/mamba-370m", 8, 4096),
    Run("state-spaces/mamba-1.4b", 4, 4096),
    Run("state-spaces/mamba-2.8b", 2, 4096),
    Run("state-spaces/mamba2-2.7b", 2, 4096),
    Run("granite-4.0-h-micro", 2, 4096),
    Run("llama2-7b", 2, 4096, theirs=1, reshard=True),
    Run("state-spaces/mamba-370m", 1, 32768),
    Run("state-spaces/mamba-1.4b", 1, 32768, recompute=2, theirs=2),
    Run("state-spaces/mamba-2.8b", 1, 32768, recompute=1, theirs=1),
    Run("state-spaces/mamba2-2.7b", 1, 32768, recompute=1, theirs=1),
    Run("granite-4.0-h-micro", 1, 32768, recompute=1, theirs=1),
    Run("llama2-7b", 1, 32768, recompute=1, theirs=1, reshard=True),
)
TINY = (
    Run("mamba-tiny", 2, 128),
    Run("mamba2-tiny", 2, 128),
    Run("granitemoehybrid-tiny", 2, 128),
    Run("llama-tiny", 2, 128, recompute=1, theirs=1),
)


@dataclass(frozen=True)
class Measured:
    """The measurements of one training; the numbers are None if it did not fit the memory."""

    who: str
    tokens_per_second: float | None
    mfu: float | None = None
    peak_bytes: int | None = None
    retries: int | None = None
    """Times that memory was short and the cache was freed, each of which waits for the GPU."""
    seconds: tuple[float, ...] = ()
    """Seconds of each counted step."""
    losses: tuple[float, ...] = ()
    kernels: tuple[tuple[str, float], ...] = ()
    """Milliseconds per step: of all kernels together, then of each, the longest first."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], help="[default: all]")
    parser.add_argument("--lengths", nargs="*", default=[], type=int, help="[default: all]")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    unknown = set(given.models) - {run.name for run in (*RUNS, *TINY)}
    if unknown:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    if given.output and not given.output.absolute().parent.is_dir():
        parser.error(f"--output: the folder {given.output.parent} is not there")
    there = RUNS if torch.cuda.is_available() else TINY
    runs = [
        run
        for run in there
        if run.name in (given.models or [run.name])
        and run.length in (given.lengths or [run.length])
    ]
    if not runs:
        on = "a GPU" if torch.cuda.is_available() else "a CPU"
        named = ", ".join(f"{run.name} at {run.length}" for run in there)
        parser.error(f"--models, --lengths: no such run on {on}, which has {named}")
    compare(given.steps, runs, profile=given.profile, output=given.output)
    return 0


def compare(
    steps: int,
    runs: Sequence[Run] | None = None,
    *,
    profile: bool = False,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every pair that this machine can run, or the given ones."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        print("no GPU: tiny models, to try the benchmark; this is no result", flush=True)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "is_result": on_gpu and runs is not TINY,
        "versions": versions(),
        "runs": [],
    }
    group = start(device.type)
    for run in (RUNS if on_gpu else TINY) if runs is None else runs:
        pair = [measured(run, ours(run, group), "ours", steps, device, profile)]
        reference = reference_of(preset(run.name), run.theirs, device)
        if reference is not None:
            who, make = reference
            pair.append(measured(run, make, who, steps, device, profile))
        result["runs"].append({**asdict(run), "trainings": [asdict(one) for one in pair]})
        for one in pair:
            print("\n".join(lines(run, one)), flush=True)
        if output:
            output.write_text(json.dumps(result, indent=2) + "\n")
    stop()
    return result


def versions() -> dict[str, str | None]:
    """Return the versions that the numbers depend on; None for what is not installed."""
    found: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "mamba_ssm", "causal_conv1d", "flash_attn", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    return found


def lines(run: Run, one: Measured) -> list[str]:
    """Format a training as one line, plus one for each kernel of its profile."""
    start = f"{run.name}, {run.batch} x {run.length}, {one.who}: "
    if one.tokens_per_second is None:
        return [start + "out of memory"]
    mfu = f", MFU {one.mfu:.1%}" if one.mfu is not None else ""
    memory = f", {one.peak_bytes / 2**30:.1f} GiB" if one.peak_bytes is not None else ""
    losses = f"loss {one.losses[0]:.3f} -> {one.losses[-1]:.3f}"
    whole = f"{start}{one.tokens_per_second:,.0f} tokens/s{mfu}{memory}, {losses}"
    return [whole, *(f"    {time:8.1f} ms  {name}" for name, time in one.kernels)]


def measured(
    run: Run, make: Make, who: str, steps: int, device: torch.device, profile: bool
) -> Measured:
    """Train on the same random text over and over, and measure."""
    try:
        found = _measured(run, make, who, steps, device, profile)
    except torch.cuda.OutOfMemoryError:
        found = Measured(who, None)
    gc.collect()  # modules and their parameters form reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _measured(
    run: Run, make: Make, who: str, steps: int, device: torch.device, profile: bool
) -> Measured:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    retried = _retries(device)
    model, loss_of = make(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=on_gpu)
    random = torch.Generator().manual_seed(0)
    vocabulary = preset(run.name).vocab_size
    tokens = torch.randint(vocabulary, (run.batch, run.length + 1), generator=random)  # (b, l + 1)
    tokens = tokens.to(device)  # (b, l + 1)

    def step() -> float:
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])  # ()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return round(loss.item(), 4)  # synchronizes with the device

    times, losses = [], []
    for _ in range(SKIPPED + steps):
        since = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - since)
    rate = run.batch * run.length / statistics.median(times[SKIPPED:])
    peak = flops.peak(device_name(device))
    work = flops.per_token(preset(run.name), run.length)
    return Measured(
        who=who,
        tokens_per_second=round(rate, 1),
        mfu=None if peak is None else round(rate * work / peak, 4),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        retries=_retries(device) - retried if on_gpu else None,
        seconds=tuple(round(one, 4) for one in times[SKIPPED:]),
        losses=tuple(losses),
        kernels=kernels(step, device) if profile else (),
    )


def _retries(device: torch.device) -> int:
    stats = torch.cuda.memory_stats() if device.type == "cuda" else {}
    return stats.get("num_alloc_retries", 0)


def kernels(step: Callable[[], float], device: torch.device) -> tuple[tuple[str, float], ...]:
    """Return the milliseconds of a step in all kernels together and in each, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as traced:
        step()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = [
        (one.key[:100], (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / 1e3)
        for one in traced.key_averages()
        if one.device_type == wanted and not one.is_user_annotation
    ]
    longest = sorted(found, key=lambda pair: -pair[1])[:KERNELS]
    everything = ("all", sum(time for _, time in found))
    return tuple((name, round(time, 2)) for name, time in (everything, *longest))


def ours(run: Run, group: Group) -> Make:
    """Make our model as training does: FSDP over one rank, float32 master weights."""

    def make(device: torch.device) -> tuple[nn.Module, Step]:
        config = ParallelConfig(
            fsdp_activation_checkpointing=bool(run.recompute),
            selective_checkpointing=max(1, run.recompute),
            low_cpu_fsdp=True,
            reshard_after_forward=run.reshard,
        )
        weights = cast(Source, _DrawnThere(run.name, device))
        model = fsdp.build(preset(run.name), config, group, seed=1, weights=weights)
        return model, model

    return make


class _DrawnThere:
    """Initial values as in training, except for large matrices, which the device draws quickly."""

    def __init__(self, name: str, device: torch.device) -> None:
        with torch.device("meta"):
            self.model = build(preset(name))
        self.device = device

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        if shape.numel() < 1 << 20:
            return self.model.initial(name, shape, seed)  # shape
        return torch.randn(shape, device=self.device).mul_(0.02)  # shape


if __name__ == "__main__":
    sys.exit(main())
