"""A trace of a few steps by torch's profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from training.observers.phases import Observer
from training.process_group import Group


class Profiler(Observer):
    """Traces steps 4 to 6 of this start into SAVE/profile_traces/rank_<R>.json.

    One step is waited for and two warm up, so allocations and compilation are not in the trace.
    """

    def __init__(self, save_path: str, group: Group) -> None:
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

    def __enter__(self) -> Profiler:
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
            self._profile.step()
