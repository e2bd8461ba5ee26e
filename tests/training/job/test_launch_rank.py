"""What stands between torchrun and a process: its cores, and nsys around it.

A stand-in for nsys records its arguments, runs its program as nsys does, and dies of a SIGTERM,
which must reach the process that trains instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import instance_trees

pytestmark = pytest.mark.processes

Start = Callable[..., "subprocess.Popen[str]"]

ENTRY_POINT = """\
import os, signal, sys, time

def configure(flags):
    pass

def save(number, frame):
    print("saved\\n", end="", flush=True)
    sys.exit(85)

if __name__ == "__main__":
    rank, what = os.environ["RANK"], sys.argv[1 + int(os.environ["RANK"])]
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    named = os.environ.get("RANK_CORES") or os.environ.get("RANK_NSYS")
    said = [f"rank {rank}:", __spec__.name, os.path.basename(sys.argv[0]), "cores", cores]
    own = sorted(name for name in sys.modules if name.startswith(("training", "torch")))
    # One write: -u, which torchrun gives, has one for each of several arguments.
    print(" ".join([*said, "left", str(named), "loaded", *own]) + "\\n", end="", flush=True)
    if what == "sleep":
        signal.signal(signal.SIGTERM, save)
        print("ready\\n", end="", flush=True)
        time.sleep(60)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(what))
"""
NSYS = """\
#!/bin/bash
printf '%s\\n' "$@" > "$WORDS/rank$RANK"
while [[ $1 != --output ]]; do shift; done
shift 2
"$@"
exit $?
"""


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "nsys"
    instance_trees.write(program, NSYS)
    program.chmod(0o755)
    return program


@pytest.fixture
def start(tmp_path: Path, root: Path) -> Start:
    """Start a node of two GPUs, each close to one of this machine's first two cores."""
    (tmp_path / "entry.py").write_text(ENTRY_POINT)
    node = tmp_path / "node"
    instance_trees.processors(node, 4, 2)
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("two cores to choose from")
    for number in range(2):
        listed = f"{allowed[number]}"
        instance_trees.write(node / f"sys/devices/system/node/node{number}/cpulist", listed)
        instance_trees.gpu(node, number, number)
    code = textwrap.dedent(f"""\
        import pathlib, sys
        from training import launch
        sys.exit(launch.main(sys.argv[1:], pathlib.Path({str(node)!r})))
    """)

    def begin(*what: str, **environment: str) -> subprocess.Popen[str]:
        outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
        own = {"PYTHONPATH": f"{root}:{tmp_path}", "OMP_NUM_THREADS": "1", "WORDS": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-c", code, "--module", "entry", "--", *what],
            env=outside | own | environment,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return begin


def run(start: Start, *what: str, **environment: str) -> tuple[int, str, str]:
    with start(*what, **environment) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_each_process_has_its_own_cores(start: Start) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    code, out, err = run(start, "0", "0")
    assert code == 0, err
    assert "-m training.job.rank entry 0 0" in out
    for rank, core in ((0, first), (1, second)):
        # As if the module had been started alone, with only its own package loaded.
        assert (
            f"rank {rank}: entry entry.py cores {core} left None loaded training training.job\n"
            in out.replace(" training.job.rank", "")
        )


def test_nothing_stands_between_where_there_is_nothing_to_do(start: Start) -> None:
    code, out, err = run(start, "0", "0", NUMA_BIND="0")
    assert code == 0, err
    assert "-m entry 0 0" in out and "loaded\n" in out


@pytest.mark.parametrize(
    ("what", "code"), [(("2", "2"), 2), (("85", "85"), 85), (("0", "die"), 137)]
)
def test_exit_codes_are_the_modules(start: Start, what: tuple[str, str], code: int) -> None:
    assert run(start, *what)[0] == code


def test_chosen_ranks_are_profiled(start: Start, nsys: Path, tmp_path: Path) -> None:
    code, out, err = run(start, "0", "0", NSYS="1", NSYS_RANKS="1", NSYS_PATH=str(nsys))
    assert code == 0, err
    second = sorted(os.sched_getaffinity(0))[1]
    assert f"rank 1: entry entry.py cores {second} left None" in out
    assert not (tmp_path / "rank0").exists()
    output = f"{tmp_path}/nsys/report_joblocal.0_rank%q{{RANK}}_on_%h.nsys-rep"
    assert (tmp_path / "rank1").read_text().splitlines() == [
        *("profile", "--sample", "none", "--kill", "none", "--delay", "30", "--duration", "1200"),
        *("--force-overwrite", "true", "--output", output),
        *(sys.executable, "-u", "-m", "entry", "0", "0"),
    ]
    assert (tmp_path / "nsys").is_dir()


def test_what_is_asked_of_nsys(start: Start, nsys: Path, tmp_path: Path) -> None:
    asked = {"NSYS_RANKS": "all", "NSYS_DELAY": "0", "NSYS_DURATION": "5"}
    place = f"{tmp_path}/own/%q{{RANK}}.nsys-rep"
    path = f"{nsys.parent}:{os.environ['PATH']}"
    code, out, err = run(start, "0", "0", NSYS="1", NSYS_OUTPUT=place, PATH=path, **asked)
    assert code == 0, err
    assert f"all ranks, for 5 s after 0 s, by {nsys}" in out
    for rank in ("0", "1"):
        words = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert words[5:13] == [
            *("--delay", "0", "--duration", "5", "--force-overwrite", "true", "--output", place),
        ]


@pytest.mark.parametrize("node", ["0", "1"])
def test_no_nsys_no_job(start: Start, node: str) -> None:
    """Every node reports it, as others may have it."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": node}
    here = slurm | {"MASTER_ADDR": "127.0.0.1", "PATH": "/usr/bin:/bin"}
    code, out, err = run(start, "0", "0", NSYS="1", **here)
    assert code == 2 and "rank 0" not in out
    assert err.startswith("error: NSYS=1: there is no nsys on the PATH")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1])
def test_profiled_processes_save_too(start: Start, nsys: Path, how: signal.Signals) -> None:
    with start("sleep", "sleep", NSYS="1", NSYS_PATH=str(nsys)) as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            said = process.stdout.readline()
            assert said, process.stderr and process.stderr.read()
            ready += "ready" in said
        process.send_signal(how)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 85, err
    assert out.count("saved") == 2


def test_training_profiled(nsys: Path, root: Path, tmp_path: Path) -> None:
    """By the command line, with worker processes that read data."""
    outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "WORDS": str(tmp_path), "NSYS": "1"}
    own |= {"NSYS_PATH": str(nsys), "CHECKPOINTS": str(tmp_path / "run")}
    flags = ["--model_name=mamba-tiny", f"--dataset_path=text:{root}/training/*.py"]
    flags += ["--seq_length=64", "--batch_size=2", "--num_steps=2", "--report_interval=1"]
    flags += [f"--save_ckpt_path={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-m", "training.launch", "--", *flags],
        env=outside | own,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").exists() and (tmp_path / "run/nsys").is_dir()
    assert (tmp_path / "run/metrics.jsonl").exists()
