"""Asking the origin of each pin: indexes, repositories and registries on the loopback."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Lock, resolve
from sqshforge.network.mirrors import Mirrors
from sqshforge.outdated import Hosts, Pin, survey
from tests.support.archives import Image, file, folder, layer, write
from tests.support.registries import push
from tests.support.registries import registry_fixture as registry_fixture
from tests.support.web_servers import Index, Web, asking, sdist, small_recipe, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture
from tests.support.web_servers import web_fixture as web_fixture

pytestmark = pytest.mark.processes

NewIndex = Callable[..., Index]
GIT = "https://git.example.test/tool"
VENDOR = "https://vendor.example.test/simple"


@pytest.fixture
def index(new_index: NewIndex) -> Index:
    """The package index of a recipe for Python 3.10; pip, which all images have, is the newest."""
    return new_index(wheel("pip", "25.3"))


def surveyed(
    where: Path,
    index: Index,
    *packages: str,
    indexes: Mapping[str, object] | None = None,
    mirrors: Mirrors | None = None,
    before: Lock | None = None,
    **parts: Any,
) -> dict[str, Pin]:
    """Return what was found out about each pin of a small recipe, by name."""
    what = small_recipe(where, packages, indexes, **parts)
    (where / "recipes").mkdir(exist_ok=True)
    (where / "small.yaml").rename(where / "recipes" / "small.yaml")
    found = survey(what, asking(where, index.pip, mirrors, before), Hosts(Programs()))
    return {pin.name: pin for pin in found}


def test_a_package_is_held_back_by_what_another_pin_needs(index: Index, tmp_path: Path) -> None:
    index.add(
        wheel("app", needs=["tool<2"]), *(wheel("tool", one) for one in ("1.0", "1.5", "2.0"))
    )
    found = surveyed(tmp_path, index, "app==1.0", "tool==1.0")
    assert found["app"].state == found["pip"].state == "newest"
    tool = found["tool"]
    assert (tool.pinned, tool.fits, tool.newest) == ("1.0", "1.5", "2.0")
    assert re.search("app.* on tool<2", tool.held_by[0])


def test_a_package_is_held_back_by_its_own_needs(index: Index, tmp_path: Path) -> None:
    index.add(wheel("app"), wheel("app", "2.0", needs=["tool>=2"]), wheel("tool"))
    index.add(wheel("tool", "2.0"))
    app = surveyed(tmp_path, index, "app==1.0", "tool==1.0")["app"]
    assert (app.fits, app.newest) == ("1.0", "2.0")
    assert "depends on tool>=2" in app.held_by[0]


def test_a_package_that_only_another_python_takes_is_reported_with_that(
    index: Index, tmp_path: Path
) -> None:
    index.add(wheel("app"), wheel("app", "1.1"), wheel("app", "2.0", python=">=3.12"))
    app = surveyed(tmp_path, index, "app==1.0")["app"]
    assert (app.fits, app.newest) == ("1.1", "2.0")
    assert app.held_by == ("2.0 needs Python 3.12, and the recipe has 3.10",)


def test_what_is_free_to_move_is_held_by_nothing(index: Index, tmp_path: Path) -> None:
    index.add(wheel("app"), wheel("app", "2.0"), wheel("app", "3.0rc1"))
    app = surveyed(tmp_path, index, "app==1.0")["app"]
    assert (app.fits, app.newest, app.held_by) == ("2.0", "2.0", ())


def test_a_name_that_no_index_has_leaves_the_others_their_answers(
    index: Index, tmp_path: Path
) -> None:
    index.add(wheel("app"), wheel("app", "2.0"))
    found = surveyed(tmp_path, index, "app==1.0", "own==1.0")
    assert found["own"].silent == "no index that was asked has it"
    assert (found["app"].newest, found["app"].fits) == ("2.0", None)
    assert "the pins as they are do not resolve" in found["app"].remarks()


def test_an_index_that_does_not_answer_is_said_to(index: Index, tmp_path: Path) -> None:
    index.web.code = 503
    found = surveyed(tmp_path, index, "app==1.0")
    assert {pin.silent for pin in (found["app"], found["pip"])} == {
        "the package index does not answer"
    }


def test_a_cache_that_uv_cannot_write_is_not_taken_for_an_index_without_packages(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(wheel("app"))
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache" / "uv"))
    with pytest.raises(MissingError, match="uv cannot look for packages"):
        surveyed(tmp_path, index, "app==1.0")


def test_a_bound_package_is_asked_of_its_index_alone(
    index: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    index.add(wheel("app"), wheel("app", "2.0"), wheel("chip", "99.0"))
    vendor = new_index(wheel("chip", needs=["app<2"]), wheel("chip", "1.1"))
    bound = {"vendor": {"url": VENDOR, "packages": ["chip==1.0"]}}
    there = Mirrors(indexes={VENDOR: vendor.url})
    found = surveyed(tmp_path, index, "app==1.0", indexes=bound, mirrors=there)
    assert found["chip"].newest == "1.1"
    assert (found["app"].fits, found["app"].newest) == ("1.0", "2.0")
    vendor.web.stop()
    found = surveyed(tmp_path, index, "app==1.0", indexes=bound, mirrors=there)
    assert found["chip"].silent == "the index vendor does not answer"
    assert (found["app"].fits, found["app"].newest) == (None, "2.0")
    assert "chip" not in index.asked


def test_a_compiled_package_is_held_by_its_patch_and_never_built(
    index: Index, tmp_path: Path
) -> None:
    index.add(wheel("app"), sdist("kernel"), sdist("kernel", "2.0"))
    found = surveyed(
        tmp_path,
        index,
        "app==1.0",
        cuda={"architectures": ["90"]},
        python={"built": [{"package": "kernel==1.0", "needs": ["app"]}]},
        patches={"kernel": ["kernel-1.0/fix.patch"]},
    )
    kernel = found["kernel"]
    assert (kernel.fits, kernel.newest) == (None, "2.0")
    assert "its patch is for this version: kernel-1.0/fix.patch" in kernel.held_by
    assert "it is compiled here" in kernel.held_by[-1]


def test_tools_of_the_build_need_not_fit_beside_the_image(index: Index, tmp_path: Path) -> None:
    index.add(wheel("app", needs=["ninja<2"]), wheel("ninja"), wheel("ninja", "2.0"))
    found = surveyed(tmp_path, index, "app==1.0", python={"builders": ["ninja==1.0"]})
    assert (found["ninja"].fits, found["ninja"].newest) == ("2.0", "2.0")


def git(where: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.test"]
    return Programs().capture(["git", "-C", where, *who, *words]).strip()


def test_a_source_has_newer_tags_and_a_branch_moves(index: Index, tmp_path: Path) -> None:
    place = tmp_path / "tool"
    place.mkdir()
    git(place, "init", "--quiet", "--initial-branch", "release/1.x")
    git(place, "commit", "--quiet", "--allow-empty", "--message", "one")
    git(place, "tag", "v1.0")
    git(place, "tag", "--annotate", "--message", "two", "v1.1")
    index.add(wheel("app"))
    there = Mirrors(sources={GIT: place.as_uri()})
    pins = {"tag": {"git": GIT, "ref": "v1.0"}, "branch": {"git": GIT, "ref": "release/1.x"}}
    what = small_recipe(tmp_path, ["app==1.0"], sources=pins)
    before = resolve(what, asking(tmp_path, index.pip, there))

    def asked(**more: object) -> dict[str, Pin]:
        sources = {**pins, **more}
        return surveyed(tmp_path, index, "app==1.0", mirrors=there, before=before, sources=sources)

    found = asked()
    assert (found["tag"].newest, found["tag"].moved) == ("v1.1", "")
    assert found["branch"].state == "newest"
    git(place, "commit", "--quiet", "--allow-empty", "--message", "two")
    git(place, "branch", "release/2.x")
    found = asked(gone={"git": GIT, "ref": "v0.9"}, deaf={"git": GIT + "2", "ref": "v1.0"})
    assert found["tag"].moved == ""
    assert found["branch"].newest == "release/2.x"
    assert "release/1.x has moved" in found["branch"].moved
    assert found["gone"].moved == "v0.9 is not there"
    assert found["deaf"].silent == "its host does not answer"


def test_an_image_has_newer_tags_and_its_own_moves(
    registry: str, index: Index, tmp_path: Path
) -> None:
    index.add(wheel("app"))
    one = write(Image([layer(folder("d"))]), "oci-archive", tmp_path / "one.tar")
    two = write(Image([layer(file("b", b"1"))]), "oci-archive", tmp_path / "two.tar")
    for tag in ("1.0-base", "1.10-base", "1.10-devel", "2.0"):
        push(one, f"{registry}/system:{tag}")
    base = {"image": f"{registry}/system:1.0-base", "compiler": "127.0.0.1:1/system:1"}
    parts: dict[str, Any] = {"base": base}
    before = resolve(small_recipe(tmp_path, ["app==1.0"], **parts), asking(tmp_path, index.pip))
    found = surveyed(tmp_path, index, "app==1.0", before=before, **parts)
    image = found[f"{registry}/system"]
    assert (image.pinned, image.newest, image.moved) == ("1.0-base", "1.10-base", "")
    assert found["127.0.0.1:1/system"].silent == "its registry does not answer"
    push(two, f"{registry}/system:1.0-base")
    moved = surveyed(tmp_path, index, "app==1.0", before=before, **parts)[f"{registry}/system"]
    assert moved.moved.startswith("the tag has moved from ")
    assert replace(moved, moved="") == image


def test_an_image_without_a_tag_is_asked_of_its_own_registry(
    registry: str, index: Index, tmp_path: Path
) -> None:
    index.add(wheel("app"))
    one = write(Image([layer(folder("d"))]), "oci-archive", tmp_path / "one.tar")
    push(one, f"{registry}/lib/system:latest")
    base = {"image": f"{registry}/lib/system"}
    image = surveyed(tmp_path, index, "app==1.0", base=base)[f"{registry}/lib/system"]
    assert (image.pinned, image.newest, image.state) == ("latest", "latest", "newest")


def test_a_registry_that_lists_no_tags_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a repository whose images were all deleted, some return null."""
    said = Result((), 0, '{"Repository": "r", "Tags": null}', "")
    monkeypatch.setattr(Programs, "which", lambda *_: Path("skopeo"))
    monkeypatch.setattr(Programs, "attempt", lambda *_, **__: said)
    assert Hosts(Programs()).tags("registry.example.test:5000/r:1") == []


def speak_german(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make apt-cache answer in German, unless it is asked for the locale C."""
    folder.mkdir()
    german = f"{shutil.which('apt-cache')} \"$@\" | sed 's/Candidate:/Installationskandidat:/'"
    english = f'exec {shutil.which("apt-cache")} "$@"'
    stub = folder / "apt-cache"
    stub.write_text(f'#!/bin/sh\n[ "$LC_ALL" = C ] && {english}\n{german}\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_debian_packages_of_a_vendor_are_asked_of_its_archive(
    index: Index, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(wheel("app"))
    speak_german(tmp_path / "bin", monkeypatch)
    stanza = "Package: chip\nArchitecture: amd64\nVersion: {}\nFilename: x.deb\nSize: 1\n\n"
    web.files["/dists/jammy/main/binary-amd64/Packages"] = "".join(
        map(stanza.format, ("1.9-a", "1.10-b"))
    ).encode()
    found = surveyed(
        tmp_path,
        index,
        "app==1.0",
        apt_sources={
            "near": {
                "url": web.url,
                "suite": "jammy",
                "key": "key",
                "packages": ["chip=1.9-a", "withdrawn=1"],
            },
            "far": {
                "url": "http://127.0.0.1:1",
                "suite": "jammy",
                "key": "key",
                "packages": ["absent=1", "free"],
            },
        },
        archives={
            "key": {"url": "https://files.example.test/key.asc"},
            "driver": {"url": "https://files.example.test/driver-1.30.tar.gz"},
        },
    )
    assert (found["chip"].newest, found["chip"].state) == ("1.10-b", "outdated")
    assert found["absent"].silent == "the archive far does not answer"
    assert found["withdrawn"].silent == "the archive near does not have it"
    assert "its host lists no files" in found["driver"].silent
    assert not {"free", "key"} & found.keys()


def test_debian_packages_are_not_asked_without_apt(
    index: Index, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Fedora the archive is not to blame."""
    which = Programs.which
    monkeypatch.setattr(
        Programs, "which", lambda self, name: None if "apt" in name else which(self, name)
    )
    index.add(wheel("app"))
    near = {"url": web.url, "suite": "jammy", "key": "key", "packages": ["chip=1.9-a"]}
    archives = {"key": {"url": "https://files.example.test/key.asc"}}
    found = surveyed(tmp_path, index, "app==1.0", apt_sources={"near": near}, archives=archives)
    silent = "archives are asked through apt-get, which is not installed"
    assert (found["chip"].state, found["chip"].silent) == ("not asked", silent)
