"""What docs/images/offline.md promises, with its own commands: a bundle, then no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import checkouts, engines

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

# Variables of a make that runs these tests, or of a user's other choices.
FOREIGN = ("ENGINE", "OFFLINE", "TARGET", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "SQSHFORGE_CACHE")
# Only the loopback interface, which is up, as on a machine without a network.
ALONE = """
ip link set lo up && test "$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ')" = lo && exec "$@"
"""


def checkout(place: Path) -> Path:
    """A fresh clone that shares nothing that was downloaded or made before."""
    checkouts.clone(place)
    shutil.rmtree(place / "build")
    return place


def make(root: Path, target: str, *words: str, alone: bool = False, **environment: str) -> str:
    """Return the output of `make TARGET` for cpu-mamba; `alone`: without a network."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    before = ["unshare", "--net", "sh", "-c", ALONE, "sh"] if alone else []
    done = subprocess.run(
        [*before, "make", target, "TARGET=cpu-mamba", *words],
        cwd=root,
        env={**kept, "ENGINE": "buildah", "SQSHFORGE_CACHE": str(root / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_a_bundle_to_a_proven_sqsh_without_a_network(tmp_path: Path) -> None:
    """Gathered as if on one machine; copied to another, which was set up before."""
    here, there = checkout(tmp_path / "here"), checkout(tmp_path / "there")
    bundle = Path("build/vendor/cpu-mamba")
    for name in ("gathering", "building"):
        (tmp_path / name).mkdir()
    with engines.storage(tmp_path / "gathering"):
        said = make(here, "vendor")
    assert said.splitlines()[-1] == "next: make image TARGET=cpu-mamba OFFLINE=1 ENGINE=buildah"
    subprocess.run(["./setup.sh", "quickstart"], cwd=there, check=True, capture_output=True)
    (there / bundle).parent.mkdir(parents=True)
    shutil.move(here / bundle, there / bundle)
    with engines.storage(tmp_path / "building"):
        built = make(there, "image", alone=True, OFFLINE="1")
        assert "built in" in built
        assert "up to date" in make(there, "image", "OFFLINE=1", alone=True)
        make(there, "sqsh", "OFFLINE=1", alone=True)
        proven = make(there, "smoke-test", "OFFLINE=1", alone=True)
    assert "build/cpu-mamba.sqsh: passed" in proven
    argv = ["unsquashfs", "-cat", "build/cpu-mamba.sqsh", "sqshforge/meta/provenance.json"]
    shown = subprocess.run(argv, cwd=there, check=True, capture_output=True)
    assert json.loads(shown.stdout)["offline"] is True
