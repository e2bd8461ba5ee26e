"""docs/background/scale.md, the pages below it and their plots, made again from the models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import facts, failing, page, study
from training.config.sections import DataConfig, RunConfig
from training.data.files import OPEN
from training.data.packed import WORD
from training.job.rendezvous import TIMEOUT

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "scale.json"


@pytest.mark.processes
def test_command_line_makes_the_page_again(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    for name in page.PAGES:
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page.FOLDER / name, docs / name)
    done = run("--output", str(tmp_path), "--docs", str(docs))
    assert done.returncode == 0, done.stderr
    assert close(json.loads((tmp_path / "scale.json").read_text()), json.loads(RESULT.read_text()))
    pictures = {path.name: path.stat().st_size for path in (docs / "scale").glob("*.png")}
    assert pictures.keys() == {path.name for path in (page.FOLDER / "scale").glob("*.png")}
    assert all(4_000 < size < 80_000 for size in pictures.values())
    text = "".join((docs / name).read_text() for name in page.PAGES)
    assert all(re.search(rf"\]\((scale/)?{name}\)", text) for name in pictures)


@pytest.mark.parametrize("name", page.PAGES)
def test_the_pages_have_the_tables_of_the_result(name: str) -> None:
    shown = (page.FOLDER / name).read_text()
    assert page.fill(name, shown, json.loads(RESULT.read_text())) == shown


@pytest.mark.processes
def test_no_page_is_refused(tmp_path: Path) -> None:
    done = run("--docs", str(tmp_path))
    assert done.returncode == 2
    assert "no scale.md" in done.stderr


def test_a_table_without_its_place_is_reported() -> None:
    with pytest.raises(ValueError, match="<!-- image -->"):
        page.fill("scale.md", "# A page\n", json.loads(RESULT.read_text()))


def test_what_the_page_says_in_words() -> None:
    """Figures of the text, which no table fills in."""
    result = json.loads(RESULT.read_text())
    saves = {(row["nodes"], row["background"]): row for row in result["saves"]}
    best, waiting = (saves[4096, background] for background in (True, False))
    assert round(best["daly_s"]) == 85
    assert round(best["mtbf_s"] / 60) == 93
    assert round(best["restart_s"], -1) == 300
    mounts = [row for row in result["image"] if (row["nodes"], row["way"]) == (4096, "mount")]
    assert [round(row["formula_s"], -1) for row in mounts] == [40]
    assert round(best["goodput"] - waiting["goodput"], 2) == 0.04
    assert round(saves[512, True]["goodput"] - saves[512, False]["goodput"], 3) == 0.014
    assert round(best["writing_s"] / (best["daly_s"] + best["stall_s"]), 2) == 0.13
    assert best["goodput"] - best["goodput_hour"] > 0.25
    job = study.job(4096, background=True)
    flat = min(failing.goodput(job, best["daly_s"] * factor) for factor in (0.5, 2))
    assert best["goodput"] - flat < 0.004
    assert 1 - failing.goodput(job, 10 * best["daly_s"]) == pytest.approx(0.13, abs=0.005)
    gains: dict[int, list[float]] = {}
    for row in result["in_place"]:
        gains.setdefault(row["nodes"], []).append(row["goodput"])
    assert gains[64][-1] - gains[64][0] < 0.001
    assert round(gains[4096][1] - gains[4096][0], 3) == 0.006
    assert round(gains[4096][-1] - gains[4096][0], 2) == 0.04
    assert round(result["most_nodes"], -1) == 910
    assert round(study.STORE.write(4096) + study.STORE.away(4096), 3) == 0.024


def test_settings_that_the_models_take_are_those_of_the_project() -> None:
    assert facts.JOIN.value == TIMEOUT
    assert facts.SEQUENCE.value == DataConfig.seq_length
    assert facts.TOKEN.value == WORD.itemsize
    assert facts.KEPT_OPEN.value == OPEN
    assert RunConfig.checkpoint_interval == 20_000
    assert RunConfig.async_checkpoint
    assert RunConfig.hang_abort_seconds == 600


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.scale_sim", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def close(found: Any, expected: Any) -> bool:
    """Equal but for the last of four digits."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            close(found[name], expected[name]) for name in expected
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=2e-3))
    return bool(found == expected)
