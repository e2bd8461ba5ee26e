"""The parts of a step: in order, balanced, the same for all observers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support.runs import TINY, run, write_text
from training.checkpoint.free_memory import free_memory
from training.observers.heartbeat import Heartbeat
from training.observers.phases import Observer, Phases
from training.observers.profiling import Nsight, read_memory


class Fake:
    """Records the calls of torch.cuda.nvtx and torch.cuda.profiler, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def range_push(self, name: str) -> None:
        self.calls.append(name)

    def range_pop(self) -> None:
        self.calls.append("pop")

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


def steps(phases: Phases, count: int) -> None:
    with phases:
        for _ in range(count):
            with phases("step"), phases("data"):
                pass


def test_nsys_records_from_the_fourth_step_to_the_end() -> None:
    cuda, step = Fake(), ["step", "data", "pop", "pop"]
    steps(Phases([Nsight(cuda, cuda)]), 5)
    assert cuda.calls == [*step * 3, "start", *step * 2, "stop"]


def test_nsys_is_not_stopped_where_it_was_not_started() -> None:
    cuda = Fake()
    steps(Phases([Nsight(cuda, cuda)]), 3)
    assert "start" not in cuda.calls and "stop" not in cuda.calls


def test_an_error_ends_the_parts_that_it_goes_through() -> None:
    cuda = Fake()
    phases = Phases([Nsight(cuda, cuda)])
    with pytest.raises(ValueError), phases, phases("step"), phases("forward"):
        int("none")
    assert cuda.calls == ["step", "forward", "pop", "pop"]


def test_observers_end_in_the_reverse_of_their_order() -> None:
    shown: list[str] = []

    class Named(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def __exit__(self, *error: Any) -> None:
            shown.append(f"{self.name} leaves")

        def begin(self, phase: str) -> None:
            shown.append(f"{self.name} begins {phase}")

        def end(self, phase: str) -> None:
            shown.append(f"{self.name} ends {phase}")

    phases = Phases([Named("a"), Named("b")])
    with phases, phases("save"):
        pass
    begun, ended = ["a begins save", "b begins save"], ["b ends save", "a ends save"]
    assert shown == [*begun, *ended, "b leaves", "a leaves"]


def test_marks_count_up_within_a_step_and_know_the_longest() -> None:
    heartbeat = Heartbeat(start=7)
    phases = Phases([heartbeat])
    assert Heartbeat(0).longest_step is None
    with phases("step"):
        first = heartbeat.last
        with phases("data"):
            inside = heartbeat.last
        after = heartbeat.last
    assert (first.step, first.place) == (8, "step")
    assert (inside.place, after.place) == ("data", "after data")
    assert first.number < inside.number < after.number < heartbeat.last.number
    assert heartbeat.longest_step is not None
    with phases("step"):
        assert (heartbeat.last.step, heartbeat.last.number) == (9, 0)


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nsys_needs_a_gpu(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    flags = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/save", "--num_steps=5")
    done = run(0, *TINY, *flags, "--use_nsight=True")
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "error: use_nsight: needs a GPU; use_profiler traces steps on a CPU too"
    )


@pytest.mark.processes
def test_the_trace_of_torchs_profiler_names_the_parts(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    flags = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/save", "--num_steps=8")
    done = run(0, *TINY, *flags, "--use_profiler=True")
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "save/profile_traces/rank_0.json").read_text())
    names = [
        event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
    ]
    for part in ("step", "data", "forward", "backward", "clip", "optimizer"):
        assert names.count(part) == 3, part
    assert sum(bool(re.fullmatch(r"ProfilerStep#\d+", name)) for name in names) == 3


def test_memory_that_holds_files_until_it_is_needed_counts_as_free() -> None:
    free = read_memory(torch.device("cpu"))["host_free_bytes"]
    assert free == pytest.approx(free_memory(), rel=0.05)  # others use the machine meanwhile
