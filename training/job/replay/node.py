"""A node's part of a replay: its own ranks take the steps, and the nodes' results are compared.

Each node writes its result to RUN/.replay-JOB.RESTART.STEP/PASS.NODE and reads those of all others,
so that all reach the same verdict. Node 0 removes the folder when all have read it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from training.errors import BadNode, RequestError, TrainingError, writing
from training.job import start_folder
from training.job.plan import Plan
from training.job.preflight.checks_network import BadNodes
from training.job.preflight.settings import NodeNames
from training.job.replay.verdict import Outcome, Verdict, compare, compare_again
from training.job.restart.escalation import Failure

STEPS = 8
SECONDS = 1800.0
"""The limit for a replay on this node, and again for the other nodes to finish after it."""
SAME_BITS = {"CAUSAL_CONV1D_DETERMINISTIC": "1", "MAMBA_DETERMINISTIC": "1"}
"""Make causal-conv1d (after 1.6.1) and mamba-ssm (2.3) add up gradients in a fixed order."""
LOOK = 0.5
READ = 60.0
"""Seconds that node 0 waits for the others to read the results before it removes them."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is replayed, the same on every node of a job."""

    plan: Plan
    steps: int = STEPS
    seconds: float = SECONDS

    def run(self, environment: Mapping[str, str]) -> Verdict:
        """Replay here and on the other nodes, and compare. Every node of the job must call this.

        Raises RequestError if the run cannot be replayed, Stopped, and TrainingError.
        """
        job, folder = self.plan.job, self._folder(environment)
        names = NodeNames(job, environment)
        named = {node: names[node] for node in range(job.nodes)}
        stop = start_folder.find(job, environment)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            first = self._pass(folder, "1", environment, stop)
            verdict = compare(first, named)
            if verdict.is_open:
                second = self._pass(folder, "2", environment, stop)
                verdict = compare_again(first, second, named)
            return verdict
        finally:
            self._leave(folder)

    def _pass(
        self, folder: Path, name: str, environment: Mapping[str, str], stop: Path | None
    ) -> dict[int, Outcome]:
        """Replay once; return each node's outcome."""
        job = self.plan.job
        own = self._take(environment, stop).text
        _publish(folder / f"{name}.{job.node_rank}", own)
        found: dict[int, Outcome] = {}
        until = time.monotonic() + self.seconds
        while len(found) < job.nodes:
            for node in set(range(job.nodes)) - found.keys():
                with contextlib.suppress(OSError, ValueError):
                    found[node] = Outcome.of((folder / f"{name}.{node}").read_text())
            if time.monotonic() > until:
                late = Outcome(error=f"its replay has not ended within {self.seconds:g} s")
                found = {node: found.get(node, late) for node in range(job.nodes)}
            elif len(found) < job.nodes:
                _check_stop(stop)
                time.sleep(LOOK)
        return found

    def _take(self, environment: Mapping[str, str], stop: Path | None) -> Outcome:
        """Let the ranks of this node take the steps; return the outcome, or why there is none."""
        plan = self.plan
        with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
            output, said = Path(scratch, "output.json"), Path(scratch, "said")
            words: list[str] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            # Otherwise torchrun looks up this node's name, which not every cluster can.
            words += ["--local-addr=127.0.0.1", f"--nproc-per-node={plan.processes}"]
            words += ["-m", "training.replay_rank"]
            words += [f"--module={_module(plan)}", f"--steps={self.steps}"]
            words += [f"--scratch={scratch}/run", f"--output={output}", "--", *plan.flags]
            ours = {one.name: one.value for one in plan.variables} | SAME_BITS
            with said.open("wb") as log:
                code = _run(words, {**environment, **ours}, log, self.seconds, stop)
            if code == 0:
                record = json.loads(output.read_text())
                steps = tuple(_step(one) for one in record["steps"])
                return Outcome(step=record["step"], steps=steps, weights=record["weights"])
            return Outcome(error=_why(said.read_text(errors="replace"), code))

    def _folder(self, environment: Mapping[str, str]) -> Path:
        """Name the folder of the results. Raises RequestError for an entry point without a run."""
        plan = self.plan
        config = importlib.import_module(_module(plan)).configure(plan.flags)
        if not hasattr(config, "run"):
            raise RequestError(f"--module: a run of {plan.module} cannot be replayed")
        step = environment.get("SLURM_STEP_ID", "0")
        return Path(config.run.save_ckpt_path) / f".replay-{plan.job.run_id}.{step}"

    def _leave(self, folder: Path) -> None:
        """Note that this node has read everything; node 0 removes the folder when all have."""
        job = self.plan.job
        with contextlib.suppress(OSError):
            (folder / f"read.{job.node_rank}").touch()
        if job.node_rank:
            return
        until = time.monotonic() + READ
        while time.monotonic() < until:
            if all((folder / f"read.{node}").exists() for node in range(job.nodes)):
                break
            time.sleep(LOOK)
        shutil.rmtree(folder, ignore_errors=True)


class Stopped(Exception):  # noqa: N818 - not an error
    """The job was asked to stop during a replay."""


def is_due(failures: Sequence[Failure], nodes: int, environment: Mapping[str, str]) -> bool:
    """Tell whether a job's nodes are to be compared before it goes on.

    They are if its last two failures came after the same step in the same way: restarted in the
    same containers, it would fail again. Raises RequestError.
    """
    asked = environment.get("REPLAY") or "1"
    if asked not in ("0", "1"):
        raise RequestError(f"REPLAY: must be 0 (left out) or 1, not {asked!r}")
    if asked == "0" or nodes < 2 or len(failures) < 2:
        return False
    last, before = failures[-1], failures[-2]
    return last.step is not None and last.is_like(before)


def check(plan: Plan, failures: Sequence[Failure], environment: Mapping[str, str]) -> None:
    """Compare the nodes of a job if that is due. Raises BadNode on all nodes if one is bad."""
    if not is_due(failures, plan.job.nodes, environment):
        return
    step = failures[-1].step
    tell = _tell if plan.job.node_rank == 0 else nothing
    tell(f"it failed twice after step {step}: every node repeats {STEPS} steps from the checkpoint")
    began = time.monotonic()
    try:
        verdict = Replay(plan=plan).run(environment)
    except (Stopped, TrainingError) as error:
        tell(f"left out: {error}")
        return
    tell(f"compared in {time.monotonic() - began:.0f} s")
    conclude(plan, verdict, environment, tell)


def conclude(
    plan: Plan, verdict: Verdict, environment: Mapping[str, str], tell: Callable[[str], None]
) -> None:
    """Report what was found, and note bad nodes for the launcher. Raises BadNode."""
    if not verdict.bad:
        for line in verdict.lines:
            tell(line)
        return
    names, folder = NodeNames(plan.job, environment), environment.get("CHECKPOINTS")
    writer = next(node for node in range(plan.job.nodes) if node not in verdict.bad)
    hosts = [host for node in verdict.bad if (host := names.host(node))]
    if folder and plan.job.id != "local" and plan.job.node_rank == writer:
        with contextlib.suppress(OSError):
            BadNodes(Path(folder), plan.job).write(hosts)
    raise BadNode("\n  ".join(["replay: nodes compute different numbers", *verdict.lines]))


def _run(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    seconds: float,
    stop: Path | None,
) -> int:
    """Run a program to its end, killing all below it; return the exit code, 124 after a timeout."""
    until = time.monotonic() + seconds
    process = subprocess.Popen(
        words, env=dict(environment), stdout=log, stderr=log, start_new_session=True
    )
    try:
        while (code := process.poll()) is None:
            if time.monotonic() > until:
                return 124
            _check_stop(stop)
            time.sleep(LOOK)
        return code
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check_stop(stop: Path | None) -> None:
    """Raise Stopped if the launcher asks to stop."""
    if stop is not None and start_folder.is_asked(stop):
        raise Stopped("the job was asked to stop")


def _publish(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises TrainingError."""
    staging = path.with_name(f"{path.name}.partial")
    with writing(path):
        staging.write_text(text)
        staging.replace(path)


def _module(plan: Plan) -> str:
    """Name the module with the entry point's `configure`: for a package, its __main__."""
    found = importlib.import_module(plan.module)
    return f"{plan.module}.__main__" if hasattr(found, "__path__") else plan.module


def _step(given: Mapping[str, object]) -> str:
    """Format what a step gave, so that equal text means equal bits."""
    losses = given["losses"]
    assert isinstance(losses, list)
    return f"losses {' '.join(losses)}, norm {given['norm']}"


def _why(said: str, code: int) -> str:
    if code == 124:
        return "its replay took too long"
    errors = [line for line in said.splitlines() if "rror: " in line and "elastic" not in line]
    return errors[0].strip() if errors else f"its replay ended with exit code {code}"


def _tell(text: str) -> None:
    print(f"training.replay: {text}", flush=True)


def nothing(text: str) -> None:
    """Print nothing: the `tell` of nodes other than node 0."""
