"""Run `python3 -m training.launch` as a process, without Slurm, with a tiny entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import warm

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "MASTER_ADDR": "10.0.0.5",
}

ENTRY_POINT = """\
import os, signal, sys, time

def configure(flags):
    from training.errors import RequestError
    if "--wrong" in flags:
        raise RequestError("--wrong: there is no such flag")
    if "--slow" in flags:
        time.sleep(600)

def save(number, frame):
    time.sleep(float(os.environ.get("SAVING", "0.5")))
    print("saved\\n", end="", flush=True)
    sys.exit(85)

if __name__ == "__main__":
    rank = os.environ["RANK"]
    what = sys.argv[1 + int(rank)]
    print(f"{rank} of {os.environ['WORLD_SIZE']} {os.environ['OMP_NUM_THREADS']}\\n", end="")
    if what == "sleep":
        signal.signal(signal.SIGTERM, save)
        print("ready\\n", end="", flush=True)
        time.sleep(60)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("once-"):  # as set the first time that this is asked for
        first = not os.path.exists(os.environ["FOLLOW"])
        open(os.environ["FOLLOW"], "w").close()
        what = what.removeprefix("once-") if first else "0"
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "follow":
        while not os.path.exists(os.environ["FOLLOW"]):
            time.sleep(0.05)
        sys.exit(1)
    sys.exit(int(what))
"""


class Launch:
    """`python3 -m training.launch` for two processes of a small program, outside Slurm."""

    def __init__(self, folder: Path, root: Path) -> None:
        (folder / "entry.py").write_text(ENTRY_POINT)
        outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
        self.env = {**outside, "PYTHONPATH": f"{root}:{folder}", "OMP_NUM_THREADS": "1"}
        self.env["PREFLIGHT"] = "0"  # it has its own tests, and takes longer than everything else

    def start(
        self,
        *words: str,
        before: Sequence[str] = (),
        python: str = sys.executable,
        program: str = "training.launch",
        **env: str,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*before, python, "-m", program, *words],
            env={**self.env, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str, **env: str) -> tuple[int, str, str]:
        """Run it to its end, with a warm torchrun, as what it starts is small."""
        quick = warm.python()
        own = {**quick, "PYTHON_EXEC": sys.executable, **env}
        with self.start(*words, python=quick["PYTHON_EXEC"], **own) as process:
            out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def entry(self, *what: str) -> tuple[int, str, str]:
        return self.run("--module", "entry", "--nproc", "2", "--", *what)
