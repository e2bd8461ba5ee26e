"""Pages whose commands can run here, by copy and paste: block after block, in order.

docs/start/own-data.md, README's quickstart and its one file have their own tests (test_own_data.py,
tests/toolkit/cli/test_quickstart.py, tests/cluster/test_one_file.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.page_blocks import ROOT, TYPED, blocks, pages, type_in
from tests.support.run_folders import history, noted, write

pytestmark = pytest.mark.processes
Shell = Mapping[str, str]

LEFT_OUT = {
    "sqshforge pack cpu-mamba": "packs for minutes",
    "sqshforge trace cpu-mamba": "writes a list of the checkout",
    "srun ": "takes a cluster",
    "NSYS=1 sbatch ": "takes a cluster",
    ".venv/bin/python -m benchmarks.": "takes minutes",
}
"""Blocks that are not run here, by how they begin; test_page_commands.py checks them."""

REHEARSED = {
    ".venv/bin/pytest ": ".venv/bin/pytest --collect-only -q ",
    "make ": "make --dry-run ",
    "run.my_setting": "run.num_steps",
    "--config FILE model.name=PRESET": "--help",
}
"""Replacements for what only a developer has, or what takes too long."""


def run(page: str, folder: Path, activated: Shell) -> list[str]:
    """Type a page's blocks; returns what each of them printed."""
    typed = [
        block.text for block in blocks(page, TYPED) if not block.text.startswith(tuple(LEFT_OUT))
    ]
    assert typed, page
    return [type_in(text, folder, activated) for text in typed]


def test_a_squash_file_is_started(project: Path, activated: Shell) -> None:
    first, without_sqshforge, measured = run("docs/images/running.md", project, activated)
    assert {"me", "build", "launch"} <= set(first.split()), first
    assert {"build", "sqshforge-run.pyz"} <= set(without_sqshforge.split())
    assert 0 < float(measured) < 60
    (release,) = run("docs/images/enroot.md", project, activated)
    assert "bookworm" in release


def test_a_squash_file_is_signed_and_verified(project: Path, activated: Shell) -> None:
    key = Path(activated["HOME"]) / ".ssh" / "id_ed25519"
    key.parent.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (said,) = run("docs/images/inspecting.md", project, activated)
    assert "ann@example.org" in said


def test_an_image_says_where_it_comes_from(project: Path, activated: Shell) -> None:
    (said,) = run("docs/images/provenance.md", project, activated)
    assert json.loads(said)["target"] == "cpu-mamba"
    assert json.loads((project / "sbom.spdx.json").read_text())["spdxVersion"] == "SPDX-2.3"


def test_the_files_of_a_start_are_listed(project: Path, activated: Shell) -> None:
    (said,) = run("docs/images/hot-files.md", project, activated)
    listed = (project / "hot.txt").read_text()
    assert "torch" in listed and f"{len(hot_lines(listed))} of" in said


def hot_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_a_node_is_rehearsed(project: Path, activated: Shell) -> None:
    (said,) = run("docs/training/nodes.md", project, activated)
    assert "8 x H200" in said and "torchrun --nnodes=1 --nproc-per-node=8" in said


def test_a_model_is_trained_converted_and_writes(project: Path, activated: Shell) -> None:
    """docs/training/models.md continues with the run that training.md begins with."""
    (trained,) = run("docs/training/training.md", project, activated)
    assert "step 100/100" in trained
    _, written = run("docs/training/models.md", project, activated)
    assert (project / "try-hf" / "config.json").is_file() and (project / "weights").is_dir()
    texts = [json.loads(line) for line in (project / "texts.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in texts] == ["def main", "import os"]
    assert all(one["text"] for one in texts) and written.strip()


def test_the_state_of_a_job_is_shown(tmp_path: Path, activated: Shell) -> None:
    noted(write(tmp_path / "checkpoints" / "mamba_fsdp", history(20), num_steps=20), 0)
    (said,) = run("docs/training/status.md", tmp_path, activated)
    assert said.count("done") >= 5 and "mamba-tiny" in said


def test_a_file_is_sent_as_what_differs(tmp_path: Path, activated: Shell) -> None:
    earlier, now = (bytes(range(256)) * 4096 + end for end in (b"earlier", b"now"))
    (tmp_path / "EARLIER.sqsh").write_bytes(earlier)
    (tmp_path / "FILE.sqsh").write_bytes(now)
    _, here, there = (block.text for block in blocks("docs/background/delta.md", TYPED))
    type_in(here, tmp_path, activated)
    (tmp_path / "FILE.sqsh").unlink()  # the other end has only the earlier file and the patch
    type_in(there, tmp_path, activated)
    assert (tmp_path / "FILE.sqsh").read_bytes() == now
    assert (tmp_path / "FILE.patch").stat().st_size < len(now) / 100


def test_the_tab_key_is_set_up(tmp_path: Path, activated: Shell) -> None:
    (block,) = blocks("docs/README.md", TYPED)
    assert "sqshforge" in type_in(f"{block.text}complete -p sqshforge", tmp_path, activated)


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in pages()
        if page.startswith(("CONTRIBUTING", "docs/develop/")) and blocks(page, TYPED)
    ],
)
def test_a_developer_s_commands_name_what_is_there(page: str, activated: Shell) -> None:
    """Targets of make are looked up, and tests are collected."""
    for block in blocks(page, TYPED):
        text = block.text
        for written, typed in REHEARSED.items():
            text = text.replace(written, typed)
        type_in(text, ROOT, activated)
