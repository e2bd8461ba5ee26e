"""Where memory goes: that of the host and of the GPU at the parts of the first step.

A line of the log and a record of SAVE/memory.jsonl a place, of rank 0:
    {"step", "place", "host_bytes", "host_peak_bytes", "host_free_bytes",
     "gpu_bytes", "gpu_peak_bytes", "gpu_reserved_bytes"}         those of the GPU null without one
host_free_bytes is what the machine has left for all; peaks are those since the process began.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from training.errors import RequestError
from training.loggers.base import Lenient
from training.loggers.console import Console
from training.loggers.jsonl import JsonLines
from training.loggers.outlet import Record
from training.observers.phases import Observer

FILE = "memory.jsonl"
OF_FIRST_STEP = ("forward", "backward", "clip", "optimizer")
BETWEEN_STEPS = ("evaluation", "save")


class MemoryTracker(Observer):
    """Tells the memory when the model is made, in the first step, and between steps."""

    def __init__(self, save_path: str, device: torch.device, start: int, console: Console) -> None:
        self._device, self._console = device, console
        self._file = Lenient(JsonLines(Path(save_path), start, FILE), FILE, console)
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
        record = {"step": self._step, "place": place, **look(self._device)}
        self._file.write([record])
        self._console.say(readable(record))


class CleanCache(Observer):
    """Gives the GPU's unused memory back before every step."""

    def begin(self, phase: str) -> None:
        if phase == "step":
            torch.cuda.empty_cache()

    def end(self, phase: str) -> None:
        pass


def require_gpu(device: torch.device) -> None:
    """Raise RequestError where there is no cache to clean."""
    if device.type != "cuda":
        raise RequestError("clean_cache: needs a GPU; on a CPU nothing is kept")


def look(device: torch.device) -> Record:
    """Read the memory of this process, of its GPU, and what the machine has left; in bytes."""
    on_gpu = device.type == "cuda"
    return {
        "host_bytes": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_free_bytes": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu_bytes": torch.cuda.memory_allocated(device) if on_gpu else None,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "gpu_reserved_bytes": torch.cuda.memory_reserved(device) if on_gpu else None,
    }


def readable(record: Record) -> str:
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
