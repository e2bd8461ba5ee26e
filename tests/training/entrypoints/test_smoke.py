"""The smoke test of an image, on a folder laid out like one."""

import json
import math
import platform
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.runs import ROOT, write_text
from training.errors import TrainingError
from training.smoke import checks as smoke
from training.smoke import rehearsal
from training.smoke.__main__ import run_checks

pytestmark = pytest.mark.processes


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "meta").mkdir()
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "mamba_fsdp.sbatch").write_text("#!/bin/bash\nsrun true\n")
    with zipfile.ZipFile(tmp_path / "launch" / smoke.RUNTIME, "w") as archive:
        archive.writestr("__main__.py", "import sys; sys.exit(sys.argv[1:] != ['--help'])")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [{"name": "torch", "version": metadata.version("torch"), "hashes": []}]
    write_lock(tmp_path, python, packages)
    write_recipe(tmp_path, write_text(tmp_path / "text"), 0.9)
    return tmp_path


def write_lock(image: Path, python: str, packages: list[dict[str, Any]]) -> None:
    lock = {"python": {"version": python, "packages": packages}}
    (image / "meta" / "lock.json").write_text(json.dumps(lock))


def write_recipe(image: Path, dataset: str, ratio: float, **train: Any) -> None:
    settings = {"model_name": "mamba-tiny", "dataset": dataset, "steps": 12, **train}
    sizes = {"seq_length": 32, "batch_size": 4, "loss_ratio": ratio}
    recipe = {
        "launchers": ["mamba_fsdp"],
        "smoke": {"imports": ["torch"], "train": {**settings, **sizes}},
    }
    (image / "meta" / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML


def run(image: Path, *flags: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training.smoke", "--meta", str(image / "meta"), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_good_image(image: Path) -> None:
    done = run(image, "--json")
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout)
    checks = {check["name"]: check for check in result["checks"]}
    assert result["ok"] and all(check["ok"] for check in checks.values())
    assert list(checks) == [
        *("meta", "versions", "import torch", "launcher mamba_fsdp", "runtime", "train", "resume"),
    ]
    assert checks["train"]["losses"][6:] == checks["resume"]["losses"]
    assert checks["train"]["ratio"] < 0.9 and len(checks["train"]["losses"]) == 12


def test_every_fault_of_an_image_is_shown(image: Path) -> None:
    write_lock(image, "2.7", [{"name": "torch", "version": "0"}, {"name": "nix", "version": "1"}])
    (image / "launch" / "mamba_fsdp.sbatch").write_text("if true; then\n")
    (image / "launch" / smoke.RUNTIME).unlink()
    write_recipe(image, "text:/nowhere/*", 0.9)
    done = run(image)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("FAIL")}
    assert list(rows) == ["versions", "launcher", "runtime", "train", "resume"]
    assert "python 2.7 is locked" in rows["versions"]
    assert "torch 0 is locked" in rows["versions"] and "nix 1" in rows["versions"]
    assert "syntax error" in rows["launcher"]
    assert smoke.RUNTIME in rows["runtime"]
    assert "no file matches /nowhere/*" in rows["train"]
    assert "5 of 7 checks failed" in done.stdout


def test_a_build_that_an_index_chose_is_as_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the index did not answer when locking, the build's own suffix is not in the version."""
    monkeypatch.setattr(smoke.metadata, "version", {"cc": "2.16+4a9b", "dist": "0.10"}.get)

    def check(**cc: Any) -> str:
        python = {"version": platform.python_version(), "packages": []}
        bound = [{"name": "cc", **cc}, {"name": "dist", "version": "0.10", "hashes": []}]
        return smoke.check_versions({"python": {**python, "bound": [{"packages": bound}]}})

    assert "2 packages as locked" in check(version="2.16", hashes=[])
    for version, hashes in (("2.16", ["sha256:0"]), ("2.1", []), ("2.16+other", [])):
        with pytest.raises(TrainingError, match=r"is locked, 2\.16\+4a9b is installed"):
            check(version=version, hashes=hashes)


def test_a_loss_that_does_not_fall_fails(image: Path) -> None:
    text = write_text(image / "text")
    write_recipe(image, text, 0.01)
    said: list[str] = []
    checks = {c.name: c for c in run_checks(image / "meta", said.append)}
    assert not checks["train"].ok and "must be below 1%" in checks["train"].detail
    assert checks["resume"].ok
    count = len(checks)
    assert [one.partition(",")[0] for one in said] == [
        f"[{n} of {count}" for n in range(2, count + 1)
    ]
    percents = [int(one.partition(", ")[2].partition("%")[0]) for one in said]
    assert percents == sorted(percents) and percents[0] == 0 and percents[-1] > 50
    assert said[-1].endswith("] resume")


def test_training_that_does_not_go_on_is_ended(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 300\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(rehearsal.sys, "executable", str(hanging))
    monkeypatch.setattr(rehearsal, "TIMEOUT", 0.5)
    run = rehearsal.Rehearsal(
        {"model_name": "x", "dataset": "x", "steps": 2, "loss_ratio": 1}, image
    )
    with pytest.raises(TrainingError, match="has made no step in"):
        run.train()


def test_a_run_that_was_cut_short_is_compared_with_nothing(image: Path) -> None:
    run = rehearsal.Rehearsal(
        {"model_name": "x", "dataset": "x", "steps": 2, "loss_ratio": 1}, image
    )
    (run.whole / "checkpoints" / "step_1_ckp").mkdir(parents=True)
    (run.whole / "metrics.jsonl").write_text('{"kind": "step", "loss": 1.0}\n')
    with pytest.raises(TrainingError, match="nothing to compare with: 1 of 2 steps were trained"):
        run.resume()


@pytest.mark.parametrize(
    ("again", "where", "exact"),
    [
        ([2.0, 1.5], "", True),
        ([2.0, 1.5000001], "step 4 on", True),
        ([2.0], "step 4 on", True),
        ([2.001, 1.52], "", False),
        ([2.01, 1.5], "step 3 on", False),
        ([2.0, 1.6], "step 4 on", False),
        ([math.nan, 1.5], "step 3 on", False),
    ],
)
def test_a_resumed_run_repeats_to_the_bit_or_on_a_gpu_nearly(
    again: list[float],
    where: str,
    exact: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, library kernels add up in no fixed order."""

    def write(folder: Path, losses: list[float]) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"kind": "step", "loss": loss}) for loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        return ""

    run = rehearsal.Rehearsal({"steps": 4, "loss_ratio": 0.6}, tmp_path)
    write(run.whole, [5.0, 3.0, 2.0, 1.5])
    (run.whole / "checkpoints/step_2_ckp").mkdir(parents=True)
    monkeypatch.setattr(run, "_run", lambda folder: write(folder, again))
    if where:
        with pytest.raises(TrainingError, match=where):
            run.resume(exact=exact)
    else:
        assert run.resume(exact=exact)["losses"] == again


def test_no_image(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")
    assert done.returncode == 1
    assert "lock.json" in json.loads(done.stdout)["checks"][0]["detail"]


@pytest.mark.parametrize("devices", [0, 2])
def test_a_node_whose_gpu_is_not_seen_fails(
    image: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """On a node without a GPU nothing is claimed; no machine of these tests has one."""
    found = [Path(f"/dev/nvidia{number}") for number in range(devices)]
    monkeypatch.setattr(smoke, "nvidia_devices", lambda: found)
    write_recipe(image, write_text(image / "text"), 0.9)
    recipe = json.loads((image / "meta" / "recipe.yaml").read_text())
    recipe |= {"accelerator": "cuda", "smoke": {}}
    (image / "meta" / "recipe.yaml").write_text(json.dumps(recipe))
    (check,) = (c for c in run_checks(image / "meta", lambda text: None) if c.name == "GPU")
    assert check.ok is (devices == 0)
    assert ("torch sees none" if devices else "not tried: this node has none") in check.detail
