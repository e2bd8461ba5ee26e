"""A trace of a few steps by torch's profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from training.parallel.group import Group


def profiler(wanted: bool, save_path: str, group: Group) -> AbstractContextManager[Any]:
    """Trace steps 4 to 6 of this start into SAVE/profile_traces/rank_<R>.json; None if not wanted.

    One step is waited for and two warm up, so allocations and compilation are not in the trace.
    """
    if not wanted:
        return nullcontext()
    folder = Path(save_path) / "profile_traces"

    def write(ready: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ready.export_chrome_trace(str(folder / f"rank_{group.rank}.json"))

    activities = [ProfilerActivity.CPU]
    if group.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=2, active=3, repeat=1),
        on_trace_ready=write,
    )
