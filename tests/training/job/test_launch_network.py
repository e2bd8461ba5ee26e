"""Two nodes with their own addresses, whose host names cannot be resolved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_namespaces import Machine, bridged

pytestmark = pytest.mark.processes

ENTRY_POINT = """\
import os

def configure(flags):
    pass

if __name__ == "__main__":
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank() + 1])  # (1,)
    dist.all_reduce(value)
    print("the sum is", value.item(), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def nodes(as_root: None) -> Iterator[tuple[Machine, ...]]:
    with bridged(["no-such-name-0", "no-such-name-1"]) as bridge:
        yield bridge.machines


def test_they_meet_by_address(nodes: tuple[Machine, ...], root: Path, tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(ENTRY_POINT)
    started = []
    for rank, machine in enumerate(nodes):
        words = machine.enter(sys.executable, "-m", "training.launch", "--module", "entry", "--")
        env = {
            "PYTHONPATH": f"{root}:{tmp_path}",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "99",
            "SLURM_NODEID": str(rank),
            "SLURM_STEP_NUM_NODES": "2",
            "MASTER_ADDR": nodes[0].address,
        }
        started.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert all("the sum is 3" in text for text in said)
    assert re.search("GLOO_SOCKET_IFNAME +eth0", said[0])
