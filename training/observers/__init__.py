"""Who looks at a run's parts: the watch for hangs, nsys, profiler, memory, as it was asked for."""

from __future__ import annotations

import torch
from torch import nn

from training.checkpoint.lease import Claim
from training.config.config import RunConfig
from training.loggers.console import Console
from training.observers import nsight, profiling
from training.observers.heartbeat import Marks
from training.observers.phases import Observer, Phases
from training.observers.profile import Profiler
from training.observers.watchdog import Watch
from training.process_group import Group


def check(run: RunConfig, device: torch.device) -> None:
    """Raise RequestError for an observer that this device cannot have."""
    if run.use_nsight:
        nsight.require_gpu(device)
    if run.clean_cache:
        profiling.require_gpu(device)


def observe(
    run: RunConfig, group: Group, model: nn.Module, start: int, console: Console, claim: Claim
) -> Phases:
    """Make the observers of a run that goes on after step `start` (a collective call)."""
    found: list[Observer] = []
    if run.hang_seconds or run.hang_abort_seconds:
        marks = Marks(start)
        marks.follow(model)
        found.append(Watch(run, group, marks, console, claim))
    if run.use_nsight:
        found.append(nsight.Nsight())
    if run.use_profiler:
        found.append(Profiler(run.save_ckpt_path, group))
    if run.clean_cache:
        found.append(profiling.CleanCache())
    if run.track_memory and group.rank == 0:
        tracker = profiling.MemoryTracker(run.save_ckpt_path, group.device, start, console)
        found.append(tracker)
    return Phases(found)
