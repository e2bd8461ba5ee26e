"""The heavy targets, really built, packed and smoke-tested, on stand-ins for vendors' bases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from sqshforge import recipe
from sqshforge.build import build
from tests.support import checkouts, engines, vendor_bases
from tests.support.page_tables import PageTable
from tests.support.site import TRIAL_FLAGS, Site
from tests.support.slurm import Cluster, cluster

pytestmark = pytest.mark.timeout(5000)

KERNEL = "abc/kernel.cubin"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout with the stand-ins, and its own buildah storage."""
    folder = tmp_path_factory.mktemp("images")
    place = checkouts.copy(folder / "checkout")
    vendor_bases.prepare(place)
    (folder / "engine").mkdir()
    with engines.storage(folder / "engine"):
        vendor_bases.base(place / "build" / "bases")
        yield place
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(kill_wait=20, apart=True) as started:
        yield started


def sqshforge(root: Path, *words: str | Path) -> str:
    """Run a command of the checkout; returns its output. Bases are not kept for another pack."""
    done = subprocess.run(
        [sys.executable, "-m", "sqshforge", *words],
        cwd=root,
        env={**os.environ, "ENGINE": "buildah"},
        capture_output=True,
        text=True,
        timeout=4500,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode == 0 else pytest.fail(done.stdout + done.stderr)


def within(sqsh: Path, name: str) -> str:
    """Read a file of /sqshforge from a sqsh."""
    argv = ["unsquashfs", "-cat", str(sqsh), f"sqshforge/{name}"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def made(
    request: pytest.FixtureRequest, root: Path, results: PageTable
) -> Iterator[tuple[str, Path]]:
    """Each target, built and packed on its stand-in."""
    name = vendor_bases.name_of(request.param)
    warm = root / "warm" / name / KERNEL
    warm.parent.mkdir(parents=True)
    warm.write_text("a kernel\n")
    sqshforge(root, "lock", name)
    began = time.monotonic()
    sqshforge(root, "build", name)
    built = time.monotonic()
    sqsh = root / "build" / f"{name}.sqsh"
    sqshforge(root, "pack", name, "-o", sqsh, "--profile", "fast", "--no-cache")
    packed = time.monotonic()
    unpacked = json.loads(sqshforge(root, "inspect", sqsh, "--json"))["unpacked"]
    results.note(
        request.param,
        vendor_bases.LACKING[request.param],
        image=f"{unpacked / 1e9:.1f} GB",
        packed=f"{sqsh.stat().st_size / 1e9:.1f} GB",
        build=f"{(built - began) / 60:.0f} min",
        pack=f"{packed - built:.0f} s",
    )
    yield request.param, sqsh
    sqsh.unlink()
    # All of them together take 50 GB of disk. smp-llama starts from cuda-mamba's.
    finished = {"cuda-mamba": [], "smp-llama": ["smp-llama", "cuda-mamba"]}
    for one in finished.get(request.param, [request.param]):
        image = build.name_of(vendor_bases.name_of(one), root)
        # The image that the labels are added to has its own name; the stages that compile have
        # none.
        for words in ([image, f"{image}-plain"], ["--prune"]):
            subprocess.run(["buildah", "rmi", *words], check=True, capture_output=True)


def test_its_smoke_test_passes(made: tuple[str, Path], root: Path, results: PageTable) -> None:
    target, sqsh = made
    began = time.monotonic()
    found = json.loads(sqshforge(root, "smoke-test", sqsh, "--json"))
    seconds = f"{time.monotonic() - began:.0f} s"
    results.note(target, vendor_bases.LACKING[target], smoke_test=seconds)
    checks = {one["name"]: one for one in found["checks"]}
    assert found["ok"]
    assert {"versions", "import torch", "train", "resume"} <= set(checks)
    if target in ("cuda-mamba", "composer-mamba", "llama-fsdp"):
        assert "none failed" in checks["triton cache"]["detail"]
        assert "patch triton-2.2.0/cache-private.patch" in checks
    if target == "cuda13-mamba":
        assert {"import mamba_ssm", "import causal_conv1d"} <= set(checks)
    if target == "composer-mamba":
        assert {"import composer", "import streaming"} <= set(checks)


def test_it_says_where_it_comes_from(made: tuple[str, Path]) -> None:
    target, sqsh = made
    provenance = json.loads(within(sqsh, "meta/provenance.json"))
    assert provenance["target"] == vendor_bases.name_of(target)
    assert provenance["engine"] == "buildah"
    assert any("no registry answered" in entry for entry in provenance["unlocked"])
    assert f"target: {vendor_bases.name_of(target)}" in within(sqsh, "meta/recipe.yaml")


def test_it_carries_the_kernels_that_were_compiled_before(made: tuple[str, Path]) -> None:
    target, sqsh = made
    if target.startswith("neuron"):  # they have no Triton of ours
        listed = subprocess.run(["unsquashfs", "-l", sqsh], check=True, capture_output=True)
        assert b"triton-cache" not in listed.stdout
    else:
        assert within(sqsh, f"triton-cache/{KERNEL}") == "a kernel\n"


def test_its_bill_of_materials_is_spdx(made: tuple[str, Path], tmp_path: Path) -> None:
    _, sqsh = made
    path = tmp_path / "sbom.spdx.json"
    path.write_text(within(sqsh, "meta/sbom.spdx.json"))
    document = parse_file(str(path))
    assert validate_full_spdx_document(document) == []
    names = {package.name for package in document.packages}
    assert {"libc6", "torch", "numpy"} <= names


def test_its_launchers_train_on_two_nodes(
    made: tuple[str, Path], root: Path, slurm: Cluster, tmp_path: Path
) -> None:
    """Take each launcher from the image and train a tiny model with gloo."""
    target, sqsh = made
    launchers = recipe.find(vendor_bases.name_of(target), root / "recipes").launchers
    assert launchers
    site = Site(slurm, sqsh, tmp_path, root)
    for name in launchers:
        flags = TRIAL_FLAGS.get(name, ())
        job = site.submit(name, *flags, launcher=name, TRIAL="1", STEPS="20")
        said = site.complete(job)
        assert "1: training.launch: node 1 of 2" in said
        assert len(site.losses(name)) >= 20
