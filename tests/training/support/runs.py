"""Start the real entry point, alone or with torchrun on 127.0.0.1, and read what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import json_lines, processes, warm
from training import compat

ROOT = Path(__file__).parents[3]
ENGINES = ("fsdp1", "fsdp2") if compat.fsdp2() else ("fsdp1",)
"""The engines that this torch has."""
THREADS = 1
"""Number of threads that torch computes with in each process."""
TINY = (
    "--model_name=mamba-tiny",
    "--seq_length=17",
    "--learning_rate=3e-3",
    "--checkpoint_interval=1000",
)


def write_text(folder: Path, size: int = 60_000) -> str:
    """Write a few files of text; returns the dataset_path that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ("the", "quick", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains")
    text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(size // 3))[:size]
    for index in range(3):
        part = text[index * size // 3 : (index + 1) * size // 3]
        (folder / f"part{index}.txt").write_text(part)
    return f"text:{folder}/*.txt"


ENTRY_POINT = ("-m", "training.mamba_fsdp")
COLD = {"PYTHON_EXEC": sys.executable}
"""Makes torchrun start its processes with plain python."""


def command(
    ranks: int, *flags: str, program: Sequence[str] = (), python: str = sys.executable
) -> list[str]:
    """The entry point's command, or another program's, on `ranks` ranks; 0 is plain python."""
    run = ("-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}")
    meet = ("--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0")
    launcher = (*run, *meet) if ranks else ()
    return [python, *launcher, *(program or ENTRY_POINT), *flags]


@contextmanager
def started(
    ranks: int, *flags: str, program: Sequence[str] = (), python: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run the entry point with warm processes; nothing of it outlives the block."""
    python = python or warm.python()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS), **python}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    process = subprocess.Popen(
        command(ranks, *flags, program=program, python=python["PYTHON_EXEC"]),
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        kill_tree(process)
        process.communicate()


def run(
    ranks: int, *flags: str, timeout: float = 400, program: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the entry point to its end."""
    with started(ranks, *flags, program=program) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(save: Path, data: str, ranks: int, batch: int, steps: int, *flags: str) -> list[float]:
    """Train to the end; returns the losses of all steps."""
    done = run(
        ranks,
        *TINY,
        f"--save_ckpt_path={save}",
        f"--dataset_path={data}",
        f"--batch_size={batch}",
        f"--num_steps={steps}",
        *flags,
    )
    assert done.returncode == 0, done.stderr
    return losses(save)


def steps(save: Path) -> list[dict[str, Any]]:
    return json_lines.read(save / "metrics.jsonl", "step")


def losses(save: Path) -> list[float]:
    return [line["loss"] for line in steps(save)]


def kill_tree(process: subprocess.Popen[str], forked: Sequence[int] = ()) -> None:
    """Send kill -9 to a process that still runs, to all below it, and to those forked for it."""
    if process.poll() is not None:
        return
    processes.kill((process.pid, *processes.descendants(process.pid), *forked))


def rank_processes(process: subprocess.Popen[str]) -> dict[int, int]:
    """Return the processes of the ranks, by rank."""
    found: dict[int, int] = {}
    for pid in processes.descendants(process.pid):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [int(one[5:]) for one in environment if one.startswith(b"RANK=")]
        if ranks:
            found.setdefault(ranks[0], processes.program(pid))
    return found


def wait_for(
    what: Callable[[], object], process: subprocess.Popen[str], seconds: float = 300
) -> bool:
    """Poll quickly until `what()` holds; returns False if the process ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    raise AssertionError("waited in vain")
