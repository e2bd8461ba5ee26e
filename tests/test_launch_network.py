"""Two nodes with addresses of their own, whose host names nobody can resolve."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DOOR = """\
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
def nodes() -> Iterator[list[str]]:
    """Two network namespaces on one bridge, as 10.77.0.1 and 10.77.0.2; their names."""
    tag = f"{os.getpid() % 100000}"
    names, bridge = [f"sq{tag}a", f"sq{tag}b"], f"sq{tag}br"
    with contextlib.ExitStack() as undo:

        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True)

        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}v", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def test_they_meet_by_address(nodes: list[str], root: Path, tmp_path: Path) -> None:
    (tmp_path / "door.py").write_text(DOOR)
    started = []
    for rank, name in enumerate(nodes):
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c"]
        script = f'hostname no-such-name-{rank}; exec "$0" -m training.launch --module door --'
        env = {
            "PYTHONPATH": f"{root}:{tmp_path}",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "99",
            "SLURM_NODEID": str(rank),
            "SLURM_STEP_NUM_NODES": "2",
            "MASTER_ADDR": "10.77.0.1",
        }
        started.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *enter, script, sys.executable],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert all("the sum is 3" in text for text in said)
    assert "GLOO_SOCKET_IFNAME  eth0" in said[0]
