"""Bundles: gathered once, verified and moved; images are built from them without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge import lock, recipe
from sqshforge.build import inputs
from sqshforge.build.build import name_of
from sqshforge.engine import Engine
from sqshforge.errors import MissingError
from sqshforge.host.programs import Result
from tests.support import checkouts, engines
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

TARGET = checkouts.TARGET
# Installs what is in the bundle, and checks that only the loopback interface exists.
LINES = """{% import "fragments/python.j2" as python with context %}
RUN test "$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ')" = lo
{{ apt.install(recipe.apt, "system") }}
{{ python.install(recipe.python.version, installer, sums, site) }}
"""


def sqshforge(root: Path, *words: str, **environment: str) -> Result:
    """Run a command of a checkout, which may fail."""
    argv = [sys.executable, "-m", "sqshforge", *words]
    env = {**os.environ, **environment}
    done = subprocess.run(
        argv, cwd=root, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    return Result(tuple(argv), done.returncode, done.stdout, done.stderr)


def small(place: Path) -> Path:
    """Make a checkout whose target needs one Python package and two of Debian's."""
    root = checkouts.copy(place, LINES)
    (root / "build" / "vendor").unlink()
    path = root / "recipes" / f"{TARGET}.yaml"
    text = path.read_text()
    before = lock.read(TARGET, root / "recipes")
    kept = [one for one in before.python.packages if one.name == "filelock"]
    text = re.sub(r"^apt: .*$", "apt: [libgomp1, python3]", text, flags=re.MULTILINE)
    text = re.sub(
        r"  packages:\n(    - .*\n)+", f"  packages: [filelock=={kept[0].version}]\n", text
    )
    path.write_text(text)
    now = before.model_copy(
        update={
            "inputs": lock.inputs(recipe.load(path)),
            "python": before.python.model_copy(update={"packages": tuple(kept)}),
        }
    )
    lock.path_of(TARGET, root / "recipes").write_text(now.text())
    return root


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout with a complete bundle; tests that change it make a copy."""
    folder = tmp_path_factory.mktemp("offline")
    root = small(folder / "checkout")
    (folder / "engine").mkdir()
    with engines.storage(folder / "engine"):
        done = sqshforge(root, "vendor", TARGET, "--engine", "buildah")
    assert done.code == 0, done.err
    after = f"next: make image TARGET={TARGET} OFFLINE=1 ENGINE=buildah"
    assert done.out.splitlines()[-1] == after
    yield root


def moved(root: Path, place: Path) -> Path:
    """Copy the checkout and its bundle, as if to another machine."""
    shutil.copytree(root, place, symlinks=True, ignore=shutil.ignore_patterns("context"))
    return place


def test_an_image_is_built_from_a_moved_bundle_with_the_network_off(
    engine: Engine, bundled: Path, tmp_path: Path
) -> None:
    root = moved(bundled, tmp_path / "elsewhere")
    done = sqshforge(root, "build", TARGET, "--engine", engine.name, OFFLINE="1")
    assert done.code == 0, done.err
    name = name_of(TARGET, root)
    image = engine.image(name)
    assert image is not None
    provenance = tmp_path / "meta"
    provenance.mkdir()
    engine.copy_out(name, "/sqshforge/meta", provenance)
    assert json.loads((provenance / "provenance.json").read_text())["offline"] is True


def test_gathering_goes_on_where_it_was_stopped(
    storage: None, bundled: Path, tmp_path: Path
) -> None:
    root = moved(bundled, tmp_path / "stopped")
    bundle = root / "build" / "vendor" / TARGET
    kept = next(bundle.glob("base/*.tar"))
    missing = next(bundle.glob("wheels/filelock*"))
    content = missing.read_bytes()
    missing.with_name(f"{missing.name}.part").write_bytes(content[:1000])
    missing.unlink()
    (bundle / "bundle.json").unlink()
    before = kept.stat().st_mtime_ns
    done = sqshforge(root, "vendor", TARGET, "--engine", "buildah")
    assert done.code == 0, done.err
    assert missing.read_bytes() == content
    assert kept.stat().st_mtime_ns == before
    assert not list(bundle.rglob("*.part"))
    kept.rename(kept.with_suffix(".part"))  # as if it was stopped while saving the base image
    (bundle / "bundle.json").unlink()
    done = sqshforge(root, "vendor", TARGET, "--engine", "buildah")
    assert done.code == 0, done.err
    assert kept.is_file() and not list(bundle.rglob("*.part"))


def refused(root: Path, **environment: str) -> Result:
    """Try a build for another time, so that no existing image fits; returns its failure."""
    environment["SOURCE_DATE_EPOCH"] = "1"
    done = sqshforge(root, "build", TARGET, "--engine", "buildah", **environment)
    assert len(done.err.splitlines()) <= 6, done.err
    return done


def test_without_a_bundle_the_way_to_one_is_reported(storage: None, tmp_path: Path) -> None:
    done = refused(small(tmp_path / "checkout"), OFFLINE="1")
    assert done.code == 3
    assert f"there is no bundle of {TARGET}" in done.err
    assert f"sqshforge vendor {TARGET}" in done.err


def test_the_way_to_a_bundle_of_another_platform_names_it(root: Path, tmp_path: Path) -> None:
    what = recipe.find("cpu-mamba", root / "recipes", platform="linux/arm64")
    pins = lock.read(what.name, root / "recipes")
    with pytest.raises(MissingError) as caught:
        inputs.bundled(what, pins, tmp_path)
    assert str(caught.value.fix).endswith("sqshforge vendor cpu-mamba --platform linux/arm64")


def test_a_changed_file_of_a_bundle_is_refused(
    storage: None, bundled: Path, tmp_path: Path
) -> None:
    root = moved(bundled, tmp_path / "changed")
    wheel = next((root / "build" / "vendor" / TARGET).glob("wheels/filelock*"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    done = refused(root, OFFLINE="1")
    assert done.code == 1
    assert f"wheels/{wheel.name} has another checksum" in done.err


def test_a_file_that_is_gone_from_a_bundle_is_named(
    storage: None, bundled: Path, tmp_path: Path
) -> None:
    root = moved(bundled, tmp_path / "gone")
    wheel = next((root / "build" / "vendor" / TARGET).glob("wheels/filelock*"))
    wheel.unlink()
    done = refused(root, OFFLINE="1")
    assert done.code == 3
    assert f"the bundle lacks wheels/{wheel.name}" in done.err


def test_a_bundle_of_another_lock_is_refused(storage: None, bundled: Path, tmp_path: Path) -> None:
    root = moved(bundled, tmp_path / "other")
    path = root / "build" / "vendor" / TARGET / "bundle.json"
    path.write_text(path.read_text().replace('"lock": "sha256:', '"lock": "sha256:0'))
    done = refused(root, OFFLINE="1")
    assert done.code == 3
    assert "another lock" in done.err


def test_another_word_than_1_is_refused(storage: None, bundled: Path) -> None:
    done = refused(bundled, OFFLINE="yes")
    assert done.code == 2
    assert "OFFLINE is 'yes'" in done.err
