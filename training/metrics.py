"""What a run tells: a line a report interval, and SAVE/metrics.jsonl.

metrics.jsonl has three kinds of lines, in the order of the steps:
    {"kind": "step", "step", "loss", "grad_norm", "learning_rate", "tokens_seen"}     every step
        in a step that was left out: loss and grad_norm null, "skipped" true
    {"kind": "report", "step", "loss", "grad_norm", "learning_rate", "tokens_seen",
     "tokens_per_second_per_device", "mfu", "memory_bytes", "data_wait"}
                                                                     means of a report interval
    {"kind": "evaluation", "step", "loss", "perplexity", "tokens"}            on held-out data
data_wait is the share of the time that steps waited for data, on the rank that waited longest.
mfu, the share of the device's peak by training.flops, is null where the peak is not known.
Losses are means over all ranks, written with all their digits. A run that resumes from step N first
removes the lines after N, so the file always tells one undisturbed history.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training import flops
from training.errors import TrainingError, writing
from training.parallel.group import Group

FILE = "metrics.jsonl"


class Metrics:
    """Collects steps without making the device wait; writes them when `flush` is called."""

    def __init__(
        self,
        folder: Path,
        group: Group,
        *,
        start: int,
        num_steps: int,
        tokens_per_step: int,
        operations_per_token: float,
        may_skip: bool = False,
    ) -> None:
        self.path, self.group, self.num_steps = folder / FILE, group, num_steps
        self.tokens_per_step = tokens_per_step
        self.operations_per_token, self.may_skip = operations_per_token, may_skip
        self._pending: list[tuple[int, Tensor, Tensor, float, int]] = []
        self._interval: list[dict[str, Any]] = []
        self._since = time.perf_counter()
        if group.rank == 0:
            with writing(self.path):
                truncate(self.path, start)

    def add(
        self, step: int, loss: Tensor, grad_norm: Tensor, learning_rate: float, tokens_seen: int
    ) -> None:
        """Note a step: its loss () on this rank and its gradient norm (), read later."""
        self._pending.append((step, loss, grad_norm, learning_rate, tokens_seen))

    def flush(self) -> None:
        """Write the steps noted since the last call (a collective call).

        Raises TrainingError, on every rank, naming the first step whose loss or gradient norm is
        not a finite number, unless such steps are left out.
        """
        if not self._pending:
            return
        losses = torch.stack([loss.float() for _, loss, *_ in self._pending])  # (steps,)
        dist.all_reduce(losses)
        losses /= self.group.world_size  # (steps,)
        norms = torch.stack([norm.float() for _, _, norm, *_ in self._pending])  # (steps,)
        lines = [
            {
                "kind": "step",
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": rate,
                "tokens_seen": tokens,
            }
            for (step, _, _, rate, tokens), loss, norm in zip(
                self._pending, losses.tolist(), norms.tolist(), strict=True
            )
        ]
        self._pending.clear()
        for line in lines:
            lost = [what for what in ("loss", "grad_norm") if not math.isfinite(line[what])]
            if lost and not self.may_skip:
                raise TrainingError(
                    f"step {line['step']}: {lost[0]} is {line[lost[0]]}; the run stops here, and "
                    "no checkpoint has been written since. A lower learning_rate or "
                    "grad_clip_thresh may help; trace_nan=True names where it comes from, "
                    "on_nan=skip goes on"
                )
            if lost:
                line |= {"loss": None, "grad_norm": None, "skipped": True}
        self._interval += lines
        self._write(lines)

    def report(self, waited: float) -> None:
        """Tell the means since the last report, in which this rank `waited` seconds for data.

        A collective call.
        """
        self.flush()
        wait = torch.tensor(waited, device=self.group.device)  # ()
        dist.all_reduce(wait, op=dist.ReduceOp.MAX)
        now, count, last = time.perf_counter(), len(self._interval), self._interval[-1]
        tokens = count * self.tokens_per_step / self.group.world_size
        rate = tokens / (now - self._since)
        peak = flops.peak(name_of(self.group.device))
        line = {
            **last,
            "kind": "report",
            **{what: self._mean(what) for what in ("loss", "grad_norm")},
            "tokens_per_second_per_device": rate,
            "mfu": None if peak is None else rate * self.operations_per_token / peak,
            "memory_bytes": memory(self.group.device),
            "data_wait": wait.item() / (now - self._since),
        }
        self._interval, self._since = [], now
        self._write([line])
        if self.group.rank == 0:
            print(readable(line, self.num_steps), flush=True)

    def _mean(self, what: str) -> float | None:
        """Mean of an interval's steps, without those that were left out."""
        values = [step[what] for step in self._interval if step[what] is not None]
        return math.fsum(values) / len(values) if values else None

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """Tell what an evaluation gave."""
        perplexity = math.exp(min(loss, 700.0))  # beyond, it would be infinite
        line = {
            "kind": "evaluation",
            "step": step,
            "loss": loss,
            "perplexity": perplexity,
            "tokens": tokens,
        }
        self._write([line])
        if self.group.rank == 0:
            print(
                f"step {step}/{self.num_steps} | evaluation on {tokens:,} tokens | "
                f"loss {loss:.4f} | perplexity {perplexity:.2f}",
                flush=True,
            )

    def pause(self, seconds: float) -> None:
        """Take what was not training out of the interval's time."""
        self._since += seconds

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self.group.rank == 0:
            with writing(self.path), self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def readable(line: dict[str, Any], num_steps: int) -> str:
    """Format a report for people."""
    loss, norm = (line[what] for what in ("loss", "grad_norm"))
    mfu = "" if line["mfu"] is None else f"MFU {line['mfu']:.1%} | "
    return (
        f"step {line['step']}/{num_steps} | tokens {line['tokens_seen']:,} | "
        f"loss {'-' if loss is None else f'{loss:.4f}'} | "
        f"gradient norm {'-' if norm is None else f'{norm:.3f}'} | "
        f"learning rate {line['learning_rate']:.2e} | "
        f"{line['tokens_per_second_per_device']:,.0f} tokens/s/device | {mfu}"
        f"memory {line['memory_bytes'] / 2**30:.2f} GiB"
    )


def truncate(path: Path, step: int) -> None:
    """Keep only the whole lines up to and with a step."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if line.endswith("\n") and record["step"] <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def name_of(device: torch.device) -> str:
    """What a device is called by its maker."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory(device: torch.device) -> int:
    """Bytes at the peak: reserved on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
