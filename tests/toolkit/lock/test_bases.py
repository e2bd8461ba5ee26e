"""Base images that their makers deleted, at real registries; a silent network is different."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sqshforge import lock
from sqshforge.doctor import bases as doctor
from sqshforge.doctor.finding import Finding, Host
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Lock, LockedImage, bases
from sqshforge.network.mirrors import Mirrors
from sqshforge.network.registries import Registries, State, reason, state_of
from sqshforge.project import Project
from sqshforge.recipe import Recipe
from tests.support import checkouts
from tests.support.archives import Image, file, layer, write
from tests.support.registries import push
from tests.support.registries import registry_fixture as registry_fixture
from tests.support.web_servers import Index, small_recipe, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture
from tests.toolkit.lock.test_resolving import resolved

pytestmark = pytest.mark.processes

NOWHERE = "127.0.0.1:1/base"
LOST = "sha256:" + "0" * 64
FIX = "name an address that has it in base.mirrors of recipes/small.yaml (docs/images/recipes.md)"


@pytest.fixture
def index(new_index: Callable[..., Index]) -> Index:
    return new_index(wheel("app"), wheel("pip", "25.3"))


@pytest.fixture(scope="module")
def digest(registry: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image REGISTRY/here:1, which REGISTRY/untagged has only by its digest."""
    image = Image([layer(file("etc/os-release", b"ID=small\n"))])
    archive = write(image, "oci-archive", tmp_path_factory.mktemp("image") / "image.tar")
    push(archive, f"{registry}/here:1")
    argv = ["skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{registry}/here:1"]
    found = Programs().capture(argv).strip()
    push(f"docker://{registry}/here:1", f"{registry}/untagged@{found}")
    return found


def looked(
    folder: Path, image: str, digest: str | None = None, **base: Any
) -> Sequence[bases.Remark]:
    """Return the remarks about an image with this digest in its lock."""
    what = small_recipe(folder, ["app==1.0"], base={"image": image, **base})
    wanted = bases.wanted([(what, locked(what, digest))])
    return bases.look(wanted, Mirrors(), Registries(), Programs())


def locked(what: Recipe, digest: str | None) -> Lock:
    image = LockedImage(image=what.base.image, digest=digest)
    return Lock.model_construct(target=what.target, base=image, compiler=None)


def test_what_is_there_is_not_spoken_of(registry: str, digest: str, tmp_path: Path) -> None:
    assert looked(tmp_path, f"{registry}/here:1") == []
    assert looked(tmp_path, f"{registry}/here:1", digest) == []


def test_a_tag_that_is_gone_is_lost_with_the_way_out(
    registry: str, digest: str, tmp_path: Path
) -> None:
    (one,) = looked(tmp_path, f"{registry}/here:2")
    assert one.lost
    said, fix = one.lines()
    assert said.startswith(f"{registry}/here:2: is gone (")
    assert "manifest unknown" in said
    assert fix == f"  fix:   {FIX}"
    (one,) = looked(tmp_path, f"{registry}/never:1")
    assert one.lost and "is gone (" in one.what


def test_a_digest_that_is_gone_is_lost_also_where_its_tag_names_another_image(
    registry: str, digest: str, tmp_path: Path
) -> None:
    for tag in ("1", "2"):
        (one,) = looked(tmp_path, f"{registry}/here:{tag}", LOST)
        assert one.lost
        assert one.what.startswith("is gone by the digest of the lock too (")


def test_an_image_without_its_tag_is_reported_while_its_digest_is_there(
    registry: str, digest: str, tmp_path: Path
) -> None:
    (one,) = looked(tmp_path, f"{registry}/untagged:1", digest)
    assert not one.lost
    assert one.what.startswith("has lost its tag")
    assert f"is still at {registry}/untagged@{digest}" in one.what


@pytest.mark.parametrize("known", [True, False])
def test_a_mirror_that_has_it_is_named(
    known: bool, registry: str, digest: str, tmp_path: Path
) -> None:
    mirrors = [f"{registry}/never", f"{registry}/here"]
    image = f"{registry}/deleted:1"
    (one,) = looked(tmp_path, image, digest if known else None, mirrors=mirrors)
    assert not one.lost
    assert one.what.startswith("is gone")
    assert f"is gone at {registry}/never" in one.what
    assert one.what.endswith(f"; is still at {registry}/here:1")


def test_a_mirror_of_the_machine_counts(registry: str, digest: str, tmp_path: Path) -> None:
    what = small_recipe(tmp_path, ["app==1.0"], base={"image": f"{registry}/deleted:1"})
    mirrors = Mirrors(images={f"{registry}/deleted": f"{registry}/here"})
    wanted = bases.wanted([(what, locked(what, digest))])
    assert bases.look(wanted, mirrors, Registries(), Programs()) == []


def test_a_base_that_is_made_from_packages_is_not_lost(
    registry: str, digest: str, tmp_path: Path
) -> None:
    (one,) = looked(tmp_path, f"{registry}/here:2", bootstrap={"suite": "bookworm"})
    assert not one.lost
    assert one.what.endswith("is made from its packages instead")


def test_without_a_network_nothing_is_said_to_be_gone(tmp_path: Path) -> None:
    (one,) = looked(tmp_path, f"{NOWHERE}:1", compiler=f"{NOWHERE}:2", mirrors=["127.0.0.1:2/x"])
    assert not one.lost
    assert one.image == f"{NOWHERE}:1 and 1 more"
    assert "no registry answers" in one.what and "connection refused" in one.what
    assert "gone" not in one.what.partition(",")[0]
    assert "check the network" in one.fix


def test_an_image_that_takes_a_login_names_the_registry(tmp_path: Path) -> None:
    """Skopeo says so of closed repositories, and of those that docker.io does not have."""

    class Closed(Programs):
        def attempt(self, argv: Sequence[str | Path], **given: Any) -> Result:
            said = "reading manifest 1: requested access to the resource is denied"
            return Result(tuple(map(str, argv)), 1, "", f'level=fatal msg="{said}"\n')

    for image, host in (("nvidia/cuda:1", "docker.io"), ("host.test:5000/x:1", "host.test:5000")):
        wanted = bases.wanted([(small_recipe(tmp_path, ["a==1"], base={"image": image}), None)])
        (one,) = bases.look(wanted, Mirrors(), Registries(), Closed())
        assert not one.lost
        assert (
            one.what
            == "cannot be seen (reading manifest 1: requested access to the resource is denied)"
        )
        assert one.fix == f"skopeo login {host}, or {FIX}"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (
            'level=fatal msg="getting username and password: credential helper: exec: '
            '\\"docker-credential-desktop\\": executable file not found in $PATH"',
            State.CLOSED,
        ),
        (
            'level=error msg="The storage driver must be set"\n'
            'level=fatal msg="reading manifest 1: manifest unknown"',
            State.ABSENT,
        ),
    ],
)
def test_what_skopeo_says_is_read_from_its_last_word(said: str, state: State) -> None:
    assert state_of(reason(said)) == state


def test_what_skopeo_quotes_as_go_does_is_read() -> None:
    said = r'level=fatal msg="503 nicht verf\xfcgbar\a\n\t\"\u00e9\U0001f600\\ \u20ac"'
    said = said.replace(r"\u20ac", "\u20ac")  # printable characters are kept
    assert reason(said) == '503 nicht verf\u00fcgbar\a\n\t"\u00e9\U0001f600\\ \u20ac'


def test_the_lock_has_the_digest_of_the_first_address_that_has_one(
    index: Index, registry: str, digest: str, tmp_path: Path
) -> None:
    image = f"{registry}/deleted:1"
    mirrors = [f"{NOWHERE}", f"{registry}/here"]
    with_mirrors = resolved(tmp_path, index, base={"image": image, "mirrors": mirrors})
    assert with_mirrors.base == LockedImage(image=image, digest=digest)
    without = resolved(tmp_path, index, with_mirrors, base={"image": image})
    assert lock.changes(with_mirrors, without) == []  # another way to the image is not another pin
    none = resolved(tmp_path, index, base={"image": f"{registry}/deleted:2"})
    assert none.unlocked == (f"base image {registry}/deleted:2: no registry has it",)


def commanded(checkout: Path, index: Index, *words: str) -> Result:
    """Run a command of a checkout whose only target, small, takes its package from the index."""
    argv = [sys.executable, "-m", "sqshforge", *words]
    env = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url}
    return Programs().attempt(argv, cwd=checkout, env=env)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    place = checkouts.bare(tmp_path / "checkout")
    for path in [*(place / "recipes").glob("*.yaml"), *(place / "recipes/locks").glob("*.lock")]:
        path.unlink()
    return place


def test_the_check_of_a_lock_fails_for_a_base_that_no_address_has(
    checkout: Path, index: Index, registry: str, digest: str
) -> None:
    image = f"{registry}/passing:1"
    push(f"docker://{registry}/here:1", image)
    small_recipe(checkout / "recipes", ["app==1.0"], base={"image": image})
    assert commanded(checkout, index, "lock", "small").code == 0
    assert commanded(checkout, index, "lock", "small", "--check").code == 0
    Programs().capture(["skopeo", "delete", f"docker://{image}"])
    done = commanded(checkout, index, "lock", "small", "--check")
    assert done.code == 1
    assert f"\n{image}: is gone by the digest of the lock too (" in f"\n{done.err}"
    assert f"no longer found in any registry: {image}" in done.err
    assert f"fix:   {FIX}" in done.err
    base = {"image": image, "mirrors": [f"{registry}/here"]}
    small_recipe(checkout / "recipes", ["app==1.0"], base=base)
    done = commanded(checkout, index, "lock", "small", "--check")
    assert done.code == 0, done.err
    assert f"is still at {registry}/here:1" in done.err
    small_recipe(checkout / "recipes", ["app==1.0"], base={"image": f"{NOWHERE}:1"})
    commanded(checkout, index, "lock", "small")
    done = commanded(checkout, index, "lock", "small", "--check")
    assert done.code == 0, done.err
    assert "check the network and the proxy" in done.err


def findings(checkout: Path) -> Mapping[str, Finding]:
    return {one.what: one for one in doctor.findings(Host(project=Project(checkout)))}


def test_the_doctor_has_a_line_for_each(
    checkout: Path, registry: str, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = checkout / "recipes"
    small_recipe(recipes, ["app==1.0"], base={"image": f"{registry}/here:1"})
    assert findings(checkout)[doctor.WHAT].ok
    small_recipe(recipes, ["app==1.0"], base={"image": f"{registry}/here:2"})
    ((what, gone),) = findings(checkout).items()
    assert what == f"base image {registry}/here:2"
    assert not gone.ok and not gone.needed
    first, second = gone.lines()
    assert "is gone (" in first and FIX in second
    small_recipe(recipes, ["app==1.0"], base={"image": f"{NOWHERE}:1"})
    ((_, silent),) = findings(checkout).items()
    assert "no registry answers" in silent.detail
    (recipes / "small.yaml").write_text("target: [")
    assert "not valid YAML" in findings(checkout)[doctor.WHAT].detail
    monkeypatch.setenv("PATH", str(checkout))
    assert findings(checkout)[doctor.WHAT].detail == "not asked without skopeo"
