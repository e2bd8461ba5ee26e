"""Nodes of a preflight: real processes, each with its own oddity."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = """\
import functools, os, sys, time
from training.job import preflight
from training.job.preflight import checks_local, workers
from training.job.preflight.__main__ import main
{odd}
sys.exit(main([]))
"""

WORKER = """\
import sys
from training.job.preflight import worker
right = worker.contribution
def contribution(rank):
    value = right(rank)
    value[12345] += {error}
    return value
worker.contribution = contribution
worker.main(0, int(sys.argv[2]))
"""


@dataclass
class Ended:
    """How a node ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Node:
    """How a node is started: what its program changes first, and what it is wrapped in."""

    odd: str = ""
    wrap: tuple[str, ...] = ()


class Nodes:
    """Starts `python3 -m training.job.preflight` once per node, and waits for all of them."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.bad_nodes = self.shared / "bad-nodes.99.0"
        self._folder, self._root = folder, root

    def run(self, nodes: Sequence[Node | None], **env: str) -> list[Ended]:
        """Run the nodes to their ends; None is a node that does not come."""
        outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
        given = {
            "PYTHONPATH": f"{self._root}:{self._folder}",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "99",
            "SLURM_STEP_NUM_NODES": str(len(nodes)),
            "MASTER_ADDR": "127.0.0.1",
            "NODES": " ".join(f"host-{rank}" for rank in range(len(nodes))),
            "CHECKPOINTS": str(self.shared),
            "PREFLIGHT_SECONDS": "60",
        }
        started = []
        try:
            for rank, node in enumerate(nodes):
                if node is not None:
                    command = ["-m", "training.job.preflight"]
                    if node.odd:
                        command = [str(self._folder / f"node{rank}.py")]
                        Path(command[0]).write_text(PROGRAM.format(odd=node.odd))
                    started.append(
                        subprocess.Popen(
                            [
                                "setpriv",
                                "--pdeathsig",
                                "KILL",
                                *node.wrap,
                                sys.executable,
                                *command,
                            ],
                            env={**outside, **given, "SLURM_NODEID": str(rank), **env},
                            stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE,
                            text=True,
                        )
                    )
            said = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        ends = zip(started, said, strict=True)
        return [Ended(process.returncode, *text) for process, text in ends]

    def worker(self, **values: object) -> str:
        """Return code that makes a node's workers run another program: WORKER with these values."""
        path = self._folder / "worker.py"
        path.write_text(WORKER.format(**values))
        return f"workers.PROGRAM = ({str(path)!r},)"
