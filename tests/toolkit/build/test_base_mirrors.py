"""A build whose base image is gone takes the same one from a mirror, with either engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sqshforge.build.base_image import BaseImageProvider, prepare
from sqshforge.engine import Engine
from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Lock, LockedImage
from sqshforge.network.mirrors import Mirrors
from sqshforge.network.registries import Registries
from tests.support.archives import Image, file, layer, write
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture
from tests.support.registries import push
from tests.support.registries import registry_fixture as registry_fixture
from tests.support.web_servers import small_recipe

pytestmark = pytest.mark.processes


class Noting(Reporter):
    """Keeps everything that is reported."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.heard: list[str] = []

    def say(self, text: str) -> None:
        self.heard.append(text)


@pytest.fixture(scope="module")
def digests(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Digests of REGISTRY/kept/base:1 and :devel, which are all that the registry has."""
    found = {}
    for tag in ("1", "devel"):
        image = Image([layer(file("etc/os-release", f"ID={tag}\n".encode()))])
        archive = write(image, "oci-archive", tmp_path_factory.mktemp("image") / "image.tar")
        push(archive, f"{registry}/kept/base:{tag}")
        digest = Registries().ask(f"{registry}/kept/base:{tag}", Programs()).digest
        assert digest is not None
        found[tag] = digest
    return found


def prepared(
    engine: Engine, folder: Path, digests: Mapping[str, str], reporter: Reporter, **base: Any
) -> dict[str, str]:
    """Prepare base and compiler of a small recipe, whose lock has these digests for the tags."""

    def locked(image: str) -> LockedImage:
        return LockedImage(image=image, digest=digests.get(image.rpartition(":")[2]))

    what = small_recipe(folder, ["app==1.0"], base=base)
    lock = Lock.model_construct(
        target=what.target,
        base=locked(base["image"]),
        compiler=locked(base["compiler"]) if "compiler" in base else None,
    )
    provider = BaseImageProvider(
        engine=engine,
        cache=folder / "bases",
        keys=folder,
        mirrors=Mirrors(),
        programs=Programs(),
        reporter=reporter,
    )
    return prepare(what, lock, provider, [])


@pytest.mark.parametrize("known", [True, False], ids=["by its digest", "by its tag"])
def test_base_and_compiler_come_from_the_first_address_that_has_them(
    engine: Engine, registry: str, digests: Mapping[str, str], known: bool, tmp_path: Path
) -> None:
    reporter = Noting()
    gone = f"{registry}/gone/base"
    base = {
        "image": f"{gone}:1",
        "compiler": f"{gone}:devel",
        "mirrors": [f"{registry}/gone/too", f"{registry}/kept/base", "127.0.0.1:1/not-asked"],
    }
    locked = digests if known else {}
    names = prepared(engine, tmp_path, locked, reporter, **base)
    for name in names.values():
        assert engine.image(name) is not None
    assert reporter.heard == [
        f"base: asking the registry for {registry}/{one}:{tag}"
        + (f"@{locked[tag]}" if known else "")
        for tag in ("1", "devel")
        for one in ("gone/base", "gone/too", "kept/base")
    ]
    reporter.heard.clear()
    assert prepared(engine, tmp_path, locked, reporter, **base) == names
    assert reporter.heard == []  # no registry is asked for what the engine has


def test_a_mirror_with_another_image_under_the_tag_is_passed_by(
    engine: Engine, registry: str, digests: Mapping[str, str], tmp_path: Path
) -> None:
    other = "sha256:" + "0" * 64
    base = {"image": f"{registry}/gone/base:1", "mirrors": [f"{registry}/kept/base"]}
    with pytest.raises(MissingError) as caught:
        prepared(engine, tmp_path, {"1": other}, Noting(), **base)
    lines = caught.value.lines()
    assert lines[0] == (
        f"error: no registry gives the base image {base['image']}@{other}, at any of its "
        "2 addresses, and the recipe has no bootstrap:"
    )
    assert lines[1].startswith(f"    {base['image']}@{other}: ")
    assert lines[2].startswith(f"    {registry}/kept/base:1@{other}: ")
    assert "recipes/small.yaml, base" in lines[3]


@pytest.mark.parametrize("engine", ["buildah"], indirect=True)
def test_where_no_mirror_has_it_the_bootstrap_does(
    engine: Engine,
    registry: str,
    digests: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("sh", "buildah"):  # without mmdebstrap, which is thus what is missing
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path))
    reporter = Noting()
    base = {"image": f"{registry}/gone/base:1", "mirrors": [f"{registry}/gone/too"]}
    with pytest.raises(MissingError, match="mmdebstrap is not installed"):
        prepared(engine, tmp_path, {}, reporter, **base, bootstrap={"suite": "bookworm"})
    assert reporter.heard[-1] == "base: no registry answered; making bookworm from its packages"
