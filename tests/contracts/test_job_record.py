"""What a job records of itself in jobs/<job id>.jsonl; failing to do so never fails the job."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.composer import runs as composer
from tests.support.run_folders import facts, noted, plan
from tests.training.support.runs import ROOT
from training.job import job_log
from training.job.agent import ending
from training.job.plan import Plan


def lines(run: Path, job: str = "4242") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"jobs/{job}.jsonl").read_text().splitlines()]


def test_a_line_as_it_starts_and_one_as_it_ends(tmp_path: Path) -> None:
    about = tmp_path / "provenance.json"
    about.write_text('{"target": "cpu-mamba", "commit": "abc", "created": "2026-01-01", "x": 1}')
    shown = {"NODES": "n1 n2", "IMAGE": "/fsx/a.sqsh", "REQUEUES": "5"}
    job_log.begin(plan(tmp_path, restart=1), shown, about)
    job_log.end(plan(tmp_path, restart=1), shown, 137)
    start, end = lines(tmp_path)
    assert abs(end.pop("time") - start.pop("time")) < 5 and start.pop("host")
    image = {"file": "/fsx/a.sqsh", "target": "cpu-mamba", "commit": "abc", "created": "2026-01-01"}
    assert start == {
        "kind": "start",
        "job": "4242",
        "restart": 1,
        "nodes": 2,
        "processes": 4,
        "hosts": ["n1", "n2"],
        "module": "training.mamba_fsdp",
        "run": str(tmp_path),
        "image": image,
        "spares": 0,
        "requeues": 5,
        "restarts": 0,
    }
    assert end == {
        "kind": "end",
        "job": "4242",
        "restart": 1,
        "code": 137,
        "meaning": "killed by SIGKILL",
    }
    assert facts(tmp_path)["jobs"][0]["starts"][0]["image"] == image


def test_only_the_first_node_writes(tmp_path: Path) -> None:
    job_log.begin(plan(tmp_path, node=1), {})
    job_log.end(plan(tmp_path, node=1), {}, 0)
    assert list(tmp_path.iterdir()) == []


def test_both_folders_where_the_flags_name_another(tmp_path: Path) -> None:
    job_log.begin(plan(tmp_path / "run"), {"CHECKPOINTS": str(tmp_path / "usual")})
    assert lines(tmp_path / "run") == lines(tmp_path / "usual")
    assert lines(tmp_path / "run")[0]["run"] == str(tmp_path / "run")


def test_flags_that_are_wrong_are_noted_where_the_launcher_looks(tmp_path: Path) -> None:
    noted(tmp_path / "run", job="1")
    wrong = plan(tmp_path / "run", nothing="x")
    job_log.begin(wrong, {"CHECKPOINTS": str(tmp_path / "usual")})
    job_log.end(wrong, {"CHECKPOINTS": str(tmp_path / "usual")}, 2)
    assert not (tmp_path / "run").exists()
    assert facts(tmp_path / "usual")["state"] == "failed"


@pytest.mark.parametrize("module", ["no.such.module", "training.errors"])
def test_a_module_that_does_not_tell_its_folder(tmp_path: Path, module: str) -> None:
    job_log.begin(replace(plan(tmp_path), module=module), {"CHECKPOINTS": str(tmp_path / "c")})
    assert lines(tmp_path / "c")[0]["run"] == str(tmp_path / "c")
    job_log.begin(replace(plan(tmp_path), module=module), {})  # there is no folder to record it in
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_a_run_of_composer_is_saved_where_its_file_says(tmp_path: Path) -> None:
    """It is saved in the entry point's own folder, even if the parameter count is in its name."""

    class EntryPoint:
        @staticmethod
        def configure(flags: object) -> object:
            from training.systems.composer import yaml

            return yaml.read(tmp_path / "config.yaml")

    for name, folder in (("save", "save"), ("{run_name}", "0.0B_tiny")):
        composer.write(tmp_path / "config.yaml", composer.settings(tmp_path, tmp_path / name))
        sys.modules["tests.entry_point_of_composer"] = EntryPoint  # type: ignore[assignment]
        try:
            shown: Plan = replace(plan(tmp_path), module="tests.entry_point_of_composer")
            job_log.begin(shown, {})
        finally:
            del sys.modules["tests.entry_point_of_composer"]
        assert lines(tmp_path / folder)[0]["run"] == str(tmp_path / folder)


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    shown = plan(tmp_path / "file")
    job_log.begin(shown, {})
    job_log.end(shown, {}, 0)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all(str(tmp_path / "file/jobs/4242.jsonl") in one for one in warnings)
    assert "cannot be written (Not a directory)" in warnings[0]


@pytest.mark.processes
def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """A limit on file sizes simulates it: first a part of the line is written, then nothing."""
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from tests.support.run_folders import noted\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\nrun = Path(sys.argv[1])\n"
        "noted(run, None)\n"
        "full = (run / 'jobs/4242.jsonl').stat().st_size + 20\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (full, hard))\n"
        "noted(run, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "noted(run, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    warnings = done.stderr.splitlines()
    assert len(warnings) == 2 and "the disk is full" in warnings[0]
    shown = facts(tmp_path)
    assert shown["state"] == "done" and len(shown["jobs"][0]["starts"]) == 2


def test_meanings_agree_with_the_node_agents() -> None:
    for code in (-9, -15):
        assert job_log.meaning(128 - code) in ending(code)
    assert ending(-40) == "was killed by signal 40"  # a real-time signal, which has no name
    assert job_log.meaning(200) == job_log.meaning(1) == "it failed"
