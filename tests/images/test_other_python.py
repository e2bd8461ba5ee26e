"""smp-llama for an image with another Python, only through parameters, on a stand-in for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkouts, engines, vendor_bases

pytestmark = pytest.mark.timeout(3000)

NAME = vendor_bases.name_of("smp-llama")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout whose mirrors have cpu-mamba in place of AWS's image."""
    folder = tmp_path_factory.mktemp("python")
    place = checkouts.copy(folder / "checkout")
    vendor_bases.prepare(place)
    (folder / "engine").mkdir()
    with engines.storage(folder / "engine"):
        done = sqshforge(place, "build", "cpu-mamba")
        assert done.returncode == 0, done.stderr
        done = sqshforge(place, "lock", NAME)
        assert done.returncode == 0, done.stderr
        yield place
    shutil.rmtree(folder)


def sqshforge(
    root: Path, *words: str | Path, **parameters: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of the checkout, with parameters set by hand."""
    settings = [word for name, value in parameters.items() for word in ("--set", f"{name}={value}")]
    return subprocess.run(
        [sys.executable, "-m", "sqshforge", *words, *settings],
        cwd=root,
        env={**os.environ, "ENGINE": "buildah"},
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )


def test_an_image_of_another_python_is_built_and_passes_its_smoke_test(root: Path) -> None:
    sqsh = root / "build" / "other.sqsh"
    built = sqshforge(root, "build", NAME, **vendor_bases.SMP_OTHER)
    assert built.returncode == 0, built.stderr
    packing = ("-o", sqsh, "--profile", "fast", "--no-cache")
    packed = sqshforge(root, "pack", NAME, *packing, **vendor_bases.SMP_OTHER)
    assert packed.returncode == 0, packed.stderr
    proven = sqshforge(root, "smoke-test", sqsh, "--json")
    assert proven.returncode == 0, proven.stdout + proven.stderr
    checks = {one["name"]: one for one in json.loads(proven.stdout)["checks"]}
    assert checks["versions"]["detail"].startswith("Python 3.11.")
    assert {"import torch", "train", "resume", "launcher llama_smp"} <= checks.keys()
    script = "import os, yaml; print(os.environ['PYTORCH_VERSION'])"
    ran = sqshforge(root, "run", sqsh, "--", "python", "-c", script)
    assert ran.stdout == "2.4.1\n", ran.stderr


def test_a_tag_without_its_python_is_reported(root: Path) -> None:
    built = sqshforge(root, "build", NAME, tag=vendor_bases.SMP_OTHER["tag"])
    assert built.returncode == 1
    shown = "the base has no python3.10: set the parameter python to what its tag says"
    assert shown in built.stderr
