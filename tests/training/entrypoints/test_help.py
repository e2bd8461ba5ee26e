"""`--help` of every program in training: quick, within 80 columns, and in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT
from training import llama_fsdp, llama_smp, mamba2_neuron, mamba_fsdp
from training.config.flags import SECTIONS
from training.config.setting import settings

pytestmark = pytest.mark.processes

PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "training").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
TRAINING = {
    "training.mamba_fsdp": mamba_fsdp,
    "training.llama_fsdp": llama_fsdp,
    "training.llama_smp": llama_smp,
    "training.mamba2_neuron": mamba2_neuron,
}
NEED_TORCH = {"training.smoke.kernels", "training.job.preflight", "training.job.preflight.worker"}
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


@cache
def helped(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run all of them, with a python that has no torch where it was not needed."""
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)

    def ask(program: str) -> subprocess.CompletedProcess[str]:
        here = [str(ROOT)] if program in NEED_TORCH else [str(folder), str(ROOT)]
        return subprocess.run(
            [sys.executable, "-m", program, "--help"],
            env={**os.environ, "COLUMNS": "80", "PYTHONPATH": ":".join(here)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PROGRAMS, pool.map(ask, PROGRAMS), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("help")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_tells_what_it_does(program: str, folder: Path) -> None:
    done = helped(folder)[program]
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    usage, description, *rest = re.split(r"\n\n", done.stdout)
    assert len(usage.splitlines()) < 9 and len(description) > 40, done.stdout
    assert any("--help" in part for part in rest)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not re.search(r"^  --\w+ VALUE", done.stdout, re.MULTILINE)


def groups(text: str) -> dict[str, list[str]]:
    """Return the flags of each group."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line.removesuffix(":")
            found[title] = []
        elif match := re.match(r"  (?:-\w, )?--?([\w.]+)", line):
            found[title].append(match[1])
    return found


@pytest.mark.parametrize("program", TRAINING)
def test_training_shows_its_flags_in_groups_the_most_used_first(program: str, folder: Path) -> None:
    text = helped(folder)[program].stdout
    found = groups(text[text.index("most used:") :])
    assert next(iter(found)) == "most used" and len(found["most used"]) == 11  # with help
    for title in ("data", "optimizer", "learning rate", "parallelism and memory"):
        assert len(found[title]) > 1, title
    flags = [name for names in found.values() for name in names]
    assert len(flags) == len(set(flags))
    assert set(flags) - {"help"} == {flag.name for flag in TRAINING[program].FLAGS}


def test_types_choices_and_defaults_are_shown(folder: Path) -> None:
    text = " ".join(helped(folder)["training.mamba_fsdp"].stdout.split())
    assert "--batch_size INT sequences of one rank" in text
    assert "--learning_rate FLOAT peak, after the warm-up (default: 0.0003)" in text
    assert "--sharding_strategy {fsdp,hsdp,ddp}" in text
    assert "--fsdp_activation_checkpointing [BOOL]" in text and "(default: False)" in text
    assert "--save_ckpt_path, --ckpt_save_path TEXT" in text
    assert "--schedule TEXT one of quadratic-cosine, cosine," in text


def test_the_entry_point_for_files_lists_its_settings(folder: Path) -> None:
    text = helped(folder)["training"].stdout
    assert text.index("most used settings:") < text.index("\ndata:") < text.index("\nrun, checkp")
    shown = set(re.findall(r"^  (\w+\.\w+)=", text, re.MULTILINE))
    wanted = {f"{name}.{one.name}" for name, kind in SECTIONS.items() for one in settings(kind)}
    assert shown == wanted | {"schedule.name", "model.name"}


@pytest.mark.parametrize("program", [*TRAINING, "training.mamba_composer"])
def test_the_exit_code_of_a_run_that_saved_and_stopped_is_named(program: str, folder: Path) -> None:
    text = " ".join(helped(folder)[program].stdout.split())
    assert "85 stopped by SIGTERM after a checkpoint (start it again)" in text
