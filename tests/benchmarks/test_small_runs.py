"""Every benchmark runs, small, by the command that its page shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import ALL
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

RESULTS = ROOT / "benchmarks" / "results"
# In a network of its own, where no name server lets it wait: as its own first lines say.
ALONE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
OF_ROOT = ("pack", "rebuild")  # a daemon of their own, its layers mounted; root's images


def benchmark(*words: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    argv = [*before, sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1700)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.root if one in OF_ROOT else ())
        for one in ALL
        if one != "scale_sim"  # see test_scale_page.py
    ],
)
def test_a_small_run(name: str) -> None:
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    done = benchmark("--small", name, before=ALONE if name == "meet" else ())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{name:<10} ok, " in done.stdout
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before


def test_a_result_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.data", "--small", "--output", str(tmp_path / "new")]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=1700)
    result = json.loads((tmp_path / "new" / "data.json").read_text())
    assert {"what", "rows", "met", "machine"} <= set(result)


def test_training_steps_beside_a_reference(tmp_path: Path) -> None:
    """By the command of performance.md, with one tiny model: here is no GPU."""
    words = ["--profile", "--steps", "1", "--models", "llama-tiny", "--output", "throughput.json"]
    argv = [sys.executable, "-m", "benchmarks.throughput", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(argv, cwd=tmp_path, env=environment, check=True, capture_output=True)
    [run] = json.loads((tmp_path / "throughput.json").read_text())["runs"]
    assert [one["who"] for one in run["trainings"]] == ["ours", "transformers"]
    assert all(one["tokens_per_second"] > 0 for one in run["trainings"])
    assert all(one["kernels"][0][0] == "all" for one in run["trainings"])


def test_what_fails_ends_none_of_the_others() -> None:
    code = (
        "from benchmarks import __main__ as all\n"
        "all.ALL = {'missing': ('missing',), 'data': ('data',)}\n"
        "import sys; sys.argv = ['benchmarks', '--small']; sys.exit(all.main())\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 1
    *_, missing, data = done.stdout.splitlines()
    assert missing.startswith("missing    FAILED after "), done.stdout
    assert data.startswith("data       ok, ")


def test_an_unknown_one() -> None:
    done = benchmark("speed")
    assert done.returncode == 2 and "no such benchmark: speed; there are rebuild, " in done.stderr
