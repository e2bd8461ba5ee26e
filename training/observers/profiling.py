"""What a run costs and where: memory, traces of torch's profiler, ranges for Nsight Systems.

Rank 0 reports the memory of the host and of the GPU at the parts of the first step and between
steps, each as a line of the log and a record of SAVE/memory.jsonl:
    {"step", "place", "host_bytes", "host_peak_bytes", "host_free_bytes",
     "gpu_bytes", "gpu_peak_bytes", "gpu_reserved_bytes"}         the GPU's are null without one
host_free_bytes is what this process can still get from the machine, within the limits of its
cgroups and page cache included; peaks are since the process began.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from training.checkpoint.free_memory import free_memory
from training.errors import RequestError
from training.loggers.base import FaultTolerantLogger, Record
from training.loggers.console import Console
from training.loggers.jsonl import JsonLines
from training.observers.heartbeat import Heartbeat
from training.observers.phases import TRACE, Observer
from training.process_group import Group

MEMORY_FILE = "memory.jsonl"
OF_FIRST_STEP = ("forward", "backward", "clip", "optimizer")
BETWEEN_STEPS = ("evaluation", "save")

FIRST_RECORDED = 4
"""The first step of a start that is recorded."""


class MemoryTracker(Observer):
    """Reports the memory when the model is made, in the first step, and between steps."""

    def __init__(self, save_path: str, device: torch.device, start: int, console: Console) -> None:
        self._device, self._console = device, console
        self._file = FaultTolerantLogger(
            JsonLines(Path(save_path), start, MEMORY_FILE), MEMORY_FILE, console
        )
        self._start = self._step = start

    def __enter__(self) -> MemoryTracker:
        self._tell("model")
        return self

    def begin(self, phase: str) -> None:
        if phase == "step":
            self._step += 1

    def end(self, phase: str) -> None:
        is_first = self._step == self._start + 1
        if phase in BETWEEN_STEPS or (is_first and phase in OF_FIRST_STEP):
            self._tell(phase)

    def _tell(self, place: str) -> None:
        record = {"step": self._step, "place": place, **read_memory(self._device)}
        self._file.write([record])
        self._console.say(format_memory(record))


class CleanCache(Observer):
    """Gives back the GPU's unused memory before every step."""

    def begin(self, phase: str) -> None:
        if phase == "step":
            torch.cuda.empty_cache()

    def end(self, phase: str) -> None:
        pass


def check_clean_cache(device: torch.device) -> None:
    """Raise RequestError if there is no cache to clean."""
    if device.type != "cuda":
        raise RequestError("clean_cache: needs a GPU; on a CPU nothing is kept")


def read_memory(device: torch.device) -> Record:
    """Read the memory of this process, of its GPU, and what it can still get; in bytes."""
    on_gpu = device.type == "cuda"
    return {
        "host_bytes": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_free_bytes": free_memory(),
        "gpu_bytes": torch.cuda.memory_allocated(device) if on_gpu else None,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "gpu_reserved_bytes": torch.cuda.memory_reserved(device) if on_gpu else None,
    }


def format_memory(record: Record) -> str:
    """Format a record for people."""
    host, peak, free = (
        f"{record[name] / 2**30:.2f}"
        for name in ("host_bytes", "host_peak_bytes", "host_free_bytes")
    )
    line = (
        f"memory after {record['place']} (step {record['step']}): "
        f"host {host} GiB, peak {peak}, free {free}"
    )
    if record["gpu_bytes"] is None:
        return line
    held, most, reserved = (
        f"{record[name] / 2**30:.2f}"
        for name in ("gpu_bytes", "gpu_peak_bytes", "gpu_reserved_bytes")
    )
    return f"{line}; GPU {held} GiB, peak {most}, reserved {reserved}"


class TorchProfiler(Observer):
    """Traces steps 4 to 6 of this start into SAVE/profile_traces/rank_<R>.json, for Perfetto.

    One step is skipped and two warm up, so allocations and compilation are not in the trace.
    Writing it takes minutes for a large model, so the heartbeat treats it as a part of its own.
    """

    def __init__(self, save_path: str, group: Group, heartbeat: Heartbeat) -> None:
        folder = Path(save_path) / "profile_traces"

        def write(ready: Any) -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                ready.export_chrome_trace(str(folder / f"rank_{group.rank}.json"))
            except (OSError, RuntimeError) as error:  # a full disk; not worth the run
                print(f"WARNING: {folder}: no trace: {error}", file=sys.stderr, flush=True)

        activities = [ProfilerActivity.CPU]
        if group.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=1, warmup=2, active=3, repeat=1),
            on_trace_ready=write,
        )
        self._labels: list[Any] = []
        self._heartbeat = heartbeat

    def __enter__(self) -> TorchProfiler:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def begin(self, phase: str) -> None:
        label = record_function(phase)
        label.__enter__()
        self._labels.append(label)

    def end(self, phase: str) -> None:
        self._labels.pop().__exit__(None, None, None)
        if phase == "step":
            self._heartbeat.begin(TRACE)
            self._profile.step()
            self._heartbeat.end(TRACE)


class Nsight(Observer):
    """Opens an NVTX range for each part for Nsight Systems (nsys), and tells it when to record.

        nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx python -m training...

    records from the fourth step of a start to its end, so allocations and compilation are not in
    it. `nvtx` and `recorder` are torch.cuda's; tests pass others.
    """

    def __init__(self, nvtx: Any = torch.cuda.nvtx, recorder: Any = torch.cuda.profiler) -> None:
        self._nvtx, self._recorder = nvtx, recorder
        self._steps = 0

    def __exit__(self, *error: Any) -> None:
        if self._steps >= FIRST_RECORDED:
            self._recorder.stop()

    def begin(self, phase: str) -> None:
        if phase == "step":
            self._steps += 1
            if self._steps == FIRST_RECORDED:
                self._recorder.start()
        self._nvtx.range_push(phase)

    def end(self, phase: str) -> None:
        self._nvtx.range_pop()


def check_nsight(device: torch.device) -> None:
    """Raise RequestError if nsys would have nothing to record."""
    if device.type != "cuda":
        raise RequestError("use_nsight: needs a GPU; use_profiler traces steps on a CPU too")
