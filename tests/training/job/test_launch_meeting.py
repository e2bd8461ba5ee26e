"""How the nodes of a job meet, and what is reported if they do not, or if one ends."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.node_program import SLURM, Launch
from tests.support.ports import free_ports

pytestmark = pytest.mark.processes

TOGETHER = """\
import os, sys

def configure(flags):
    pass

def work():
    from training.errors import TrainingError
    from training.process_group import start
    group = start("cpu")
    print("met", group.gather(group.rank), flush=True)
    if "fail" in sys.argv and group.rank == 1:
        raise TrainingError("the loss is gone", local=True)
    group.barrier()
    return 0

if __name__ == "__main__":
    from training.entrypoint import exit_code, leave
    leave(exit_code(work))
"""


@pytest.fixture
def launch(tmp_path: Path, root: Path) -> Launch:
    return Launch(tmp_path, root)


def test_first_node_that_cannot_be_found(launch: Launch) -> None:
    here = SLURM | {"MASTER_ADDR": "no-such-node.invalid"}
    flags = ("--model_name=mamba-tiny", "--dataset_path=text:/usr/lib/python3.*/**/*.py")
    code, _, err = launch.run("--", *flags, **here)
    assert code == 1
    assert "MASTER_ADDR: no-such-node.invalid cannot be reached" in err and "Traceback" not in err


@pytest.mark.parametrize(("what", "codes"), [("", (0, 0)), ("fail", (1, 1))])
def test_nodes_that_meet_by_their_ranks(
    launch: Launch, tmp_path: Path, what: str, codes: tuple[int, int]
) -> None:
    """As in large jobs; a process that fails ends those of the other node."""
    (tmp_path / "together.py").write_text(TOGETHER)
    here = {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    here |= {"RENDEZVOUS": "static", "PREFLIGHT": "0"}
    words = ("--module", "together", "--nproc", "1", "--", *what.split())
    with launch.start(*words, **here) as second:
        code, out, err = launch.run(*words, **(here | {"SLURM_NODEID": "0"}))
        out_second, err_second = second.communicate(timeout=300)
    assert (code, second.returncode) == codes, err + err_second
    assert "met [0, 1]" in out and "met [0, 1]" in out_second
    assert ("rank 1" in err_second and "the loss is gone" in err_second) == bool(what)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_first_node_that_never_comes(launch: Launch, rendezvous: str) -> None:
    code = textwrap.dedent("""\
        import sys
        from training import launch
        from training.job import rendezvous
        rendezvous.TIMEOUT = 2
        sys.exit(launch.main(["--module", "entry", "--", "0"]))
    """)
    # Test the rendezvous itself: preflight would report it earlier.
    here = SLURM | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "PREFLIGHT": "0"}
    here |= {"RENDEZVOUS": rendezvous}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**launch.env, **here},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "error: the 2 nodes have not met at 127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_somebody_has(launch: Launch) -> None:
    """It is reported at once, with its owner: the others would wait for a quarter of an hour."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        here = SLURM | {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, _, err = launch.run("--module", "entry", "--", "0", **here)
    assert code == 1 and "Traceback" not in err
    assert f"error: MASTER_PORT: {port} of node 0 is taken by process {os.getpid()} (" in err


def test_first_node_that_ends_early(launch: Launch) -> None:
    """It is not reported as if the nodes had never met."""
    here = SLURM | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    words = ("--module", "entry", "--nproc", "1", "--")
    with launch.start(*words, "sleep", "sleep", **here) as second:
        code, _, err = launch.run(*words, "1", "1", **(here | {"SLURM_NODEID": "0"}))
        assert code == 1 and "ended with exit code 1" in err
        out, err = second.communicate(timeout=300)
    assert second.returncode == 1 and "saved" in out
    assert "error: node 0 has ended" in err and "Traceback" not in err


def test_first_node_that_ends_is_reported_though_the_own_process_fails_too(
    launch: Launch, tmp_path: Path
) -> None:
    """Whichever torchrun checks first: here its processes, which it checks rarely."""
    place = f"127.0.0.1:{free_ports(1)[0]}"

    def start(first: str, seconds: float, what: str) -> subprocess.Popen[str]:
        code = "import sys; from training.job import agent; sys.exit(agent.run(sys.argv[1:]))"
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={place}", f"--rdzv-conf=is_host={first}"]
        own = ["--nnodes=2", "--max-restarts=0", f"--monitor-interval={seconds}"]
        return subprocess.Popen(
            [sys.executable, "-c", code, *meet, *own, "-m", "entry", what, what],
            env={**launch.env, "FOLLOW": str(tmp_path / "follow")},
            text=True,
            stderr=subprocess.PIPE,
        )

    with start("false", 5, "follow") as second, start("true", 0.1, "1") as first:
        _, said = first.communicate(timeout=300)
        assert "node 0 has ended" not in said
        (tmp_path / "follow").touch()
        _, said = second.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (1, 1)
    assert re.search(r"rank [01] \(process \d+\) ended with exit code 1", said)
    assert f"node 0 has ended, its rendezvous is gone at {place}: " in said


def test_processes_whose_end_nobody_notices() -> None:
    """For example on a node that is cut off from the first, where torchrun waits for an answer."""
    code = textwrap.dedent("""\
        import subprocess, sys, time
        from training.job import agent
        agent.UNNOTICED_SECONDS = 1.0
        started = [subprocess.Popen(["sh", "-c", how]) for how in ("exit 86", "kill -9 $$")]
        agent.watch_ended(lambda: [one.pid for one in started], agent._leave)
        time.sleep(600)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 86
    assert "ended with exit code 86: no progress" in done.stderr
    assert "was killed by SIGKILL, and node 0 does not answer" in done.stderr
