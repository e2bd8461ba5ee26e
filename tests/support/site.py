"""A shared folder from which to submit an image's launchers on the tests' own Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import json_lines, processes
from tests.support.slurm import Cluster

TIMEOUT = 1200  # seconds: long enough for the slowest machine, to catch what hangs

TRIAL_FLAGS = {"mamba2_neuron": ("--backend=gloo", "--logging_interval=10")}
"""What a launcher's trial needs on machines with only CPUs."""

Losses = list[tuple[int, float]]


@dataclass(frozen=True)
class Site:
    """A site where the only sqshforge to be found is this environment's."""

    slurm: Cluster
    image: Path
    folder: Path
    root: Path

    @property
    def small(self) -> Path:
        """A small file system that both nodes see."""
        return self.folder / "small"

    @property
    def path(self) -> str:
        """The PATH of jobs, on which sqshforge is this environment's."""
        return f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def launcher(self, name: str) -> str:
        """Read a launcher from the image."""
        argv = ["unsquashfs", "-cat", str(self.image), f"sqshforge/launch/{name}.sbatch"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def submit(
        self,
        run: str,
        *flags: str,
        launcher: str = "mamba_fsdp",
        asked: tuple[str, ...] = (),
        **env: str,
    ) -> int:
        """Submit a launcher of the image, with flags for its entry point and words for sbatch."""
        return self.slurm.submit(
            *("--nodes=2", *asked, "/dev/stdin", *flags),
            script=self.launcher(launcher),
            env={
                "PATH": self.path,
                "IMAGE": str(self.image),
                "CHECKPOINTS": str(self.place(run)),
                "OMP_NUM_THREADS": "1",
                **env,
            },
            folder=self.folder,
        )

    def place(self, run: str) -> Path:
        return self.folder / run

    def complete(self, job: int, timeout: float = TIMEOUT) -> str:
        """Wait for the job to succeed; returns its output."""
        state = self.slurm.wait(job, timeout)
        said = self.slurm.output(job)
        assert state == "COMPLETED", said
        return said

    def reach(self, run: str, step: int) -> None:
        """Wait until a run has a complete checkpoint of a step."""
        place = self.place(run) / "checkpoints" / f"step_{step}_ckp"
        self.slurm.until(place.exists, TIMEOUT, f"{place} does not come")

    def go_on_to(self, run: str, step: int) -> None:
        """Wait until a run has written the losses of `step` steps."""
        path = self.place(run) / "metrics.jsonl"
        self.slurm.until(
            lambda: path.exists() and len(self.losses(run)) >= step,
            TIMEOUT,
            f"{path} does not come to step {step}",
        )

    def reach_time_limit(self, run: str, job: int) -> int:
        """Let a run reach its job's time limit and be requeued; returns its last step before that.

        The job was submitted with a distant limit and `--signal=B:TERM@30`. Slurm counts in
        minutes; the signal comes up to a minute before the requested end.
        """
        # Set the limit once the job trains, which can take more than a minute on a loaded machine.
        self.go_on_to(run, 20)
        hours, minutes, _ = map(int, self.slurm.show(job)["RunTime"].split(":"))
        limit = f"TimeLimit={60 * hours + minutes + 2}"
        self.slurm.ask("scontrol", "update", f"JobId={job}", limit)
        with processes.slowed(self.ranks(job)):
            self.slurm.until(
                lambda: "asked to stop" in self.slurm.output(job), TIMEOUT, "it is not stopped"
            )
        self.slurm.until(lambda: self.slurm.restarts(job) == 1, TIMEOUT, "it is not requeued")
        self.slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
        self.slurm.until(
            lambda: "resumed from" in self.slurm.output(job), TIMEOUT, "it is not resumed"
        )
        said = self.slurm.output(job)
        assert "asked to stop after step" in said and "exit code 85: requeued" in said
        return int(re.findall(r"asked to stop after step (\d+)", said)[0])

    def kill(self, program: str, job: int) -> None:
        """Kill -9 a job's program on all nodes, identified by how its command line begins."""
        found = self.slurm.processes(job=job)
        victims = [pid for pid in found if processes.command(pid).startswith(program)]
        assert victims, f"no {program} runs"
        processes.kill(victims)

    def ranks(self, job: int, node: str | None = None) -> list[int]:
        """Return a job's training processes, on one node or all."""
        found = self.slurm.processes(node, job)
        return [pid for pid in found if "-m training.mamba_fsdp" in processes.command(pid)]

    def losses(self, run: str) -> Losses:
        steps = json_lines.read(self.place(run) / "metrics.jsonl", "step")
        return [(line["step"], line["loss"]) for line in steps]
