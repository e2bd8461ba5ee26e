"""The observers of a run that were asked for: watch for hangs, nsys, profiler, memory."""

from __future__ import annotations

import torch
from torch import nn

from training.checkpoint.lease import RunLease
from training.config.config import RunConfig
from training.loggers.console import Console
from training.observers import profiling
from training.observers.heartbeat import Heartbeat
from training.observers.phases import Observer, Phases
from training.observers.profiling import TorchProfiler
from training.observers.watchdog import HangWatchdog
from training.process_group import Group


def check(run: RunConfig, device: torch.device) -> None:
    """Raise RequestError for an observer that this device does not support."""
    if run.use_nsight:
        profiling.check_nsight(device)
    if run.clean_cache:
        profiling.check_clean_cache(device)


def observe(
    run: RunConfig, group: Group, model: nn.Module, start: int, console: Console, lease: RunLease
) -> Phases:
    """Make the observers of a run that goes on after step `start` (a collective call)."""
    found: list[Observer] = []
    heartbeat = Heartbeat(start)
    if run.use_nsight:
        found.append(profiling.Nsight())
    if run.use_profiler:
        found.append(TorchProfiler(run.save_ckpt_path, group, heartbeat))
    if run.clean_cache:
        found.append(profiling.CleanCache())
    if run.track_memory and group.rank == 0:
        tracker = profiling.MemoryTracker(run.save_ckpt_path, group.device, start, console)
        found.append(tracker)
    if run.hang_seconds or run.hang_abort_seconds:
        heartbeat.follow(model)
        # Last, as parts end in reverse order: for it a step is over before the profiler writes.
        found.append(HangWatchdog(run, group, heartbeat, console, lease))
    return Phases(found)
