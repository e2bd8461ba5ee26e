"""`sqshforge status` on runs that were really made, killed, stopped and resumed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sqshforge.host import suggest
from sqshforge.status import checkpoints, jobs, metrics
from tests.support.command_line import sqshforge
from tests.support.ports import free_ports
from tests.support.run_folders import HOUR, age, facts
from tests.training.support.runs import ROOT, kill_tree, wait_for, write_text
from training import errors, manifest
from training.job import job_log
from training.loggers import jsonl

pytestmark = pytest.mark.processes

STARTED = """\
import os, sys
from training.job import agent, job_log
from training.job.node import look_at_node
from training.job.plan import make_plan, read_job
job = read_job(os.environ)
plan = make_plan(job, look_at_node(job), os.environ, "training.mamba_fsdp", sys.argv[1:])
job_log.begin(plan, os.environ)
code = agent.run(plan.torchrun)
job_log.end(plan, os.environ, code)
sys.exit(code)
"""
"""The part of training.launch that writes a job's record."""
STEPS = 160


@contextmanager
def start(save: Path, data: str, restart: int) -> Iterator[subprocess.Popen[str]]:
    """Run one start of job 4242, as Slurm would; nothing of it outlives the block."""
    outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    job = {
        "SLURM_JOB_ID": "4242",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_RESTART_COUNT": str(restart),
        "NODES": "node-1",
        "IMAGE": "/fsx/cpu-mamba.sqsh",
        "CHECKPOINTS": str(save),
        "MASTER_PORT": str(free_ports(1)[0]),
        "NPROC_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    flags = (
        "--model_name=mamba-tiny",
        "--seq_length=16",
        "--batch_size=4",
        "--learning_rate=3e-3",
        f"--dataset_path={data}",
        f"--eval_dataset_path={write_text(save.with_name('held'))}",
        "--eval_batches=1",
        "--eval_interval=40",
        f"--save_ckpt_path={save}",
        f"--num_steps={STEPS}",
        "--report_interval=10",
        "--checkpoint_interval=20",
        "--keep_checkpoints=2",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, *flags],
        env={**outside, **job, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        kill_tree(process)
        process.communicate()


def last_step(save: Path) -> int:
    if not (save / "metrics.jsonl").exists():
        return 0
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed, resumed, stopped, and completed.

    reported.json beside it has what status printed on the way.
    """
    place = tmp_path_factory.mktemp("life")
    save, data, shown = place / "run", write_text(place / "text"), {}
    with start(save, data, 0) as process:
        assert wait_for(lambda: (save / "jobs/4242.jsonl").exists(), process)
        shown["begun"] = facts(save)
        assert wait_for(lambda: last_step(save) >= 40, process)
        shown["running"] = facts(save)
        kill_tree(process)
    age(save, 3 * HOUR)
    shown["killed"] = facts(save)
    with start(save, data, 1) as process:
        assert wait_for(lambda: last_step(save) >= 80, process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 85, out
    shown["stopped"] = facts(save)
    with start(save, data, 2) as process:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
    shown["done"] = facts(save)
    (place / "reported.json").write_text(json.dumps(shown))
    return save


def test_the_life_of_a_job(life: Path) -> None:
    shown = json.loads((life.parent / "reported.json").read_text())
    assert {name: one["state"] for name, one in shown.items()} == {
        "begun": "running",
        "running": "running",
        "killed": "silent",
        "stopped": "saved",
        "done": "done",
    }
    assert shown["begun"]["progress"]["step"] == 0 and shown["begun"]["seconds_left"] is None
    running = shown["running"]
    assert 40 <= running["progress"]["step"] < STEPS and running["settings"]["num_steps"] == STEPS
    assert running["progress"]["tokens_seen"] == 64 * running["progress"]["step"]
    rest = STEPS - running["progress"]["step"]
    most = rest * running["progress"]["seconds_per_step"]
    assert 0 < running["seconds_left"] <= most
    assert running["clock"] == "the file system's clock"
    assert 3 * HOUR - 10 < shown["killed"]["seconds_quiet"] < 3 * HOUR + 60
    assert shown["killed"]["checkpoints"]["newest"]["step"] >= 20
    assert not shown["stopped"]["over"] and shown["done"]["over"]
    assert shown["done"]["share"] == 1 and shown["done"]["checkpoints"]["count"] == 2
    starts = shown["done"]["jobs"][0]["starts"]
    ends = [one["end"] and (one["end"]["code"], one["end"]["meaning"]) for one in starts]
    assert ends == [None, (85, "saved and stopped, as it was asked to"), (0, "done")]
    evaluation = shown["done"]["progress"]["evaluations"]
    assert [one["step"] for one in evaluation] == [STEPS] and evaluation[0]["loss"] > 0


def test_what_people_see(life: Path) -> None:
    done = sqshforge("status", "4242", "--root", life.parent)
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == str(life)
    for shown in (
        "state done: its job has noted that it ended well",
        "model mamba-tiny",
        "job 4242, restart 2, 1 node of 1 process: node-1",
        "image /fsx/cpu-mamba.sqsh",
        "step 160 of 160 (100.0%), 10,240 tokens",
    ):
        assert shown in lines
    assert any(": no end is noted: killed, or its first node was lost" in line for line in lines)
    assert any(": saved and stopped, as it was asked to" in line for line in lines)
    assert any(line.startswith("checkpoint step 160, 3.4 MB, complete for") for line in lines)
    assert lines[-1] == f"next: {suggest.python('-m', 'training.report', life, '-o', 'report')}"


def test_it_reads_and_leaves_everything_as_it_is(life: Path) -> None:
    def seen() -> dict[str, tuple[int, int, int]]:
        paths = [life.parent, life, *life.rglob("*")]
        found = {str(path): path.stat() for path in paths}
        return {n: (s.st_mtime_ns, s.st_ctime_ns, s.st_size) for n, s in found.items()}

    before = seen()
    assert sqshforge("status", life).code == 0
    assert sqshforge("status", "--root", life.parent).code == 0
    assert seen() == before


def test_files_cut_at_every_byte_of_their_last_line(life: Path, tmp_path: Path) -> None:
    """An incomplete line is not reported, and nothing else is lost with it."""
    run = tmp_path / "run"
    shutil.copytree(life, run)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"kind": "save"' not in line))
    whole = facts(run)
    for name in ("metrics.jsonl", "jobs/4242.jsonl", "config.json"):
        path = run / name
        content = path.read_bytes()
        begin = content.rstrip().rfind(b"\n") + 1 if name.endswith("l") else len(content) - 40
        for size in range(begin, len(content)):
            path.write_bytes(content[:size])
            shown = facts(run)
            if name == "metrics.jsonl":  # the evaluation's is the last line
                assert shown["progress"] | {"evaluations": []} == whole["progress"] | {
                    "evaluations": []
                }
                assert shown["progress"]["evaluations"][0]["step"] == 120
            elif name == "config.json" and size < len(content) - 1:
                assert shown["settings"]["num_steps"] is None and shown["share"] is None
                assert shown["progress"]["loss"] == whole["progress"]["loss"]
            elif name == "jobs/4242.jsonl":
                assert shown["jobs"][0]["starts"][-1]["end"] is None
                assert shown["state"] in ("running", "done")
        assert sqshforge("status", run).code == 0
        path.write_bytes(content)
    assert facts(run)["progress"] == whole["progress"]


def test_both_sides_agree_about_names(life: Path) -> None:
    assert jobs.FOLDER == job_log.FOLDER and metrics.FILE == jsonl.FILE
    assert jobs.AGAIN == errors.SAVED
    assert manifest.checkpoints("x") == Path("x") / checkpoints.FOLDER
    assert checkpoints.MANIFEST == manifest.NAME


def test_both_sides_agree_which_checkpoints_are_complete(life: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    sound = max((life / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    for number in range(1, 9):
        shutil.copytree(sound, folder / f"step_{number}_ckp")

    def part(number: int, name: str = manifest.NAME) -> Path:
        return folder / f"step_{number}_ckp" / name

    part(8).unlink()
    part(7).write_bytes(part(7).read_bytes()[:-5])
    part(6, "__0_0.distcp").write_bytes(b"short")
    part(5, ".metadata").unlink()
    part(4).write_text("[]")
    part(3).write_text('{"files": [1]}')
    old = json.loads(part(2).read_text())
    sizes = {name: file["size"] for name, file in old["files"].items()}
    part(2).write_text(json.dumps({**old, "format": 1, "files": sizes}))
    (folder / "step_9_ckp.tmp").mkdir()
    shown = facts(tmp_path) if (tmp_path / "jobs").exists() else None
    assert shown is None  # a folder with only checkpoints is not a run's
    shutil.copy(life / "metrics.jsonl", tmp_path)
    shown = facts(tmp_path)["checkpoints"]
    found = manifest.newest(folder, lambda text: None)
    assert found is not None
    assert shown["newest"]["path"] == str(found[0]) == str(folder / "step_2_ckp")
    assert len(shown["broken"]) == 6 and shown["count"] == 2
    assert shown["writing"] == "step_9_ckp.tmp"
    assert shown["newest"]["bytes"] == sum(sizes.values())


def test_it_starts_fast_and_without_torch(life: Path) -> None:
    code = (
        "import sys; from sqshforge.cli.main import cli\n"
        "try: cli.main(['status', sys.argv[1]], standalone_mode=False)\n"
        "finally: print([one for one in ('torch', 'training') if one in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, life], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert sqshforge("status", life).code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.5  # of CPU time, which other load hardly changes
