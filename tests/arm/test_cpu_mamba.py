"""cpu-mamba for Arm, built, packed and smoke-tested for real; an emulator runs its programs.

Run it with `make test-arm`, as root. It needs qemu-user-static and Linux 6.7 or later, and takes
most of an hour on two processors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge import platforms
from sqshforge.build import build
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.image import open_image
from tests.support import checkouts, emulator, engines

pytestmark = [pytest.mark.root, pytest.mark.timeout(7200)]

ARM = ("--platform", "linux/arm64")
NAME = "cpu-mamba.arm64"


@dataclass(frozen=True)
class Made:
    """The packed file and the checkout that it was built from."""

    root: Path
    sqsh: Path

    def emulated(self, *words: str | Path) -> str:
        """Run a command of the checkout where Arm programs can run; returns its output."""
        argv = (sys.executable, "-m", "sqshforge", *words)
        done = emulator.run(*argv, cwd=self.root, env={"ENGINE": "buildah"}, timeout=7000)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def plain(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the checkout where Arm programs cannot run."""
        argv = (sys.executable, "-m", "sqshforge", *words)
        env = {**os.environ, "ENGINE": "buildah"}
        return subprocess.run(
            argv, cwd=self.root, env=env, capture_output=True, text=True, timeout=600, check=False
        )

    def read(self, name: str) -> bytes:
        """Read a file from the packed one."""
        with open_image(self.sqsh) as image:
            entry = image.find(name.encode())
            assert entry is not None, name
            return b"".join(Content(image).pieces(entry))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("arm")
    root = checkouts.copy(folder / "checkout")
    found = Made(root, root / "build" / f"{NAME}.sqsh")
    (folder / "engine").mkdir()
    with engines.storage(folder / "engine"):
        started = time.monotonic()
        found.emulated("build", "cpu-mamba", *ARM)
        built = time.monotonic()
        found.emulated("pack", "cpu-mamba", *ARM, "--no-cache")
        print(f"built in {built - started:.0f} s, packed in {time.monotonic() - built:.0f} s")
        print(f"{NAME}: {found.sqsh.stat().st_size / 1e6:.0f} MB")
        yield found
    shutil.rmtree(folder)


def test_without_an_emulator_it_is_not_begun(made: Made) -> None:
    (made.root / "images" / "fragments" / "image.j2").open("a").write("# another image\n")
    done = made.plain("build", "cpu-mamba", *ARM)
    assert done.returncode == 3
    assert "this machine cannot run programs of linux/arm64" in done.stderr
    assert "qemu-user-static" in done.stderr


def test_it_is_for_arm_in_the_engine_and_in_the_file(made: Made) -> None:
    name = build.name_of(NAME, made.root)
    argv = ["buildah", "inspect", "--type", "image", "--format", "{{.OCIv1.Architecture}}", name]
    asked = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert asked.stdout.strip() == "arm64"
    assert platforms.of_program(made.read("bin/sh")) == "linux/arm64"
    provenance = json.loads(made.read("sqshforge/meta/provenance.json"))
    assert (provenance["target"], provenance["platform"]) == ("cpu-mamba", "linux/arm64")
    assert json.loads(made.read("sqshforge/meta/lock.json"))["python"]["platform"].startswith("aar")
    packages = json.loads(made.read("sqshforge/meta/sbom.spdx.json"))["packages"]
    libc = next(one for one in packages if one["name"] == "libc6")
    assert "arch=arm64" in libc["externalRefs"][0]["referenceLocator"]


def test_its_smoke_test_passes(made: Made) -> None:
    started = time.monotonic()
    found = json.loads(made.emulated("smoke-test", made.sqsh, "--json"))
    print(f"smoke test: {time.monotonic() - started:.0f} s")
    assert found["ok"]
    checks = {one["name"]: one for one in found["checks"]}
    assert {"versions", "import torch", "train", "resume"} <= set(checks)


def test_on_a_machine_of_another_kind_it_is_reported(made: Made) -> None:
    for words in (("smoke-test", made.sqsh), ("run", made.sqsh, "--runtime=builtin", "--", "true")):
        done = made.plain(*words)
        assert done.returncode == 2
        shown = f"the image is for linux/arm64, and this machine is {platforms.own()}"
        assert shown in done.stderr
