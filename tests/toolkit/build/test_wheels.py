"""Files of locked packages: the best one for the platform, and only those in the lock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sqshforge.build import wheels as files
from sqshforge.errors import MissingError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Tracker
from sqshforge.lock import LockedPackage
from sqshforge.network.access import Pip
from sqshforge.network.download import download
from sqshforge.platforms import ARM, DEFAULT, Platform
from tests.support.web_servers import HTML, JSON, Distribution, Index, Web, sdist, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture
from tests.support.web_servers import web_fixture as web_fixture

pytestmark = pytest.mark.processes

NewIndex = Callable[..., Index]
SOURCE = sdist("tool")
# From best to worst for Python 3.10; then those that do not fit at all.
FITTING = [
    "cp310-cp310-manylinux_2_17_x86_64.manylinux2014_x86_64",
    "cp310-abi3-manylinux_2_17_x86_64",
    "cp38-abi3-manylinux2014_x86_64",
    "cp310-none-any",
    "py3-none-any",
]
FOREIGN = [
    "cp310-cp310-manylinux_2_34_x86_64",
    "cp310-cp310-manylinux_2_17_aarch64",
    "cp310-cp310-musllinux_1_2_x86_64",
    "cp310-cp310-macosx_11_0_x86_64",
    "cp310-cp310-win_amd64",
    "cp311-cp311-manylinux_2_17_x86_64",
    "cp311-abi3-manylinux_2_17_x86_64",
]


def locked(*distributions: Distribution) -> LockedPackage:
    """Return one package as in a lock that has all these files."""
    hashes = tuple(f"sha256:{one.sha256}" for one in distributions)
    return LockedPackage(name="tool", version="1.0", hashes=hashes)


def found(
    pip: Pip, *packages: LockedPackage, platform: Platform = DEFAULT
) -> tuple[files.File, ...]:
    return files.files(packages, "3.10", platform, pip, Programs())


def chosen(pip: Pip, *packages: LockedPackage) -> list[str]:
    return [one.name for one in found(pip, *packages)]


def wheels(tags: list[str]) -> list[Distribution]:
    return [wheel("tool", tag=tag) for tag in tags]


@pytest.mark.parametrize(
    ("count", "kind"), [(0, JSON), *((count, HTML) for count in range(len(FITTING)))]
)
def test_the_most_particular_wheel_that_fits_is_taken(
    count: int, kind: str, new_index: NewIndex
) -> None:
    everything = [SOURCE, *wheels(FOREIGN), *reversed(wheels(FITTING[count:]))]
    index = new_index(*everything, kind=kind)
    (file,) = found(index.pip, locked(*everything))
    best = wheel("tool", tag=FITTING[count])
    assert (file.name, file.sha256) == (best.name, best.sha256)
    assert file.url == f"{index.web.url}/files/{best.name}"


def test_on_arm_it_is_the_wheel_for_arm(new_index: NewIndex) -> None:
    everything = [SOURCE, *wheels(FITTING), *wheels(FOREIGN)]
    (file,) = found(new_index(*everything).pip, locked(*everything), platform=ARM)
    assert file.name == wheel("tool", tag="cp310-cp310-manylinux_2_17_aarch64").name


def test_without_a_wheel_that_fits_it_is_the_source(new_index: NewIndex) -> None:
    everything = [*wheels(FOREIGN), SOURCE]
    assert chosen(new_index(*everything).pip, locked(*everything)) == [SOURCE.name]


def test_nothing_that_fits_is_reported_with_the_package(new_index: NewIndex) -> None:
    index = new_index(*wheels(FOREIGN))
    with pytest.raises(
        MissingError, match=r"tool==1\.0 has no wheels with a matching platform tag"
    ):
        chosen(index.pip, locked(*wheels(FOREIGN)))


def test_a_file_that_the_lock_does_not_know_is_passed_over(new_index: NewIndex) -> None:
    plain = wheel("tool")
    index = new_index(wheel("tool", tag=FITTING[0], says="came later"), plain)
    assert chosen(index.pip, locked(plain)) == [plain.name]


def test_another_file_under_the_same_name_is_refused(new_index: NewIndex) -> None:
    index = new_index(wheel("tool", says="something else"))
    with pytest.raises(WorkError, match=r"no file of tool 1\.0 that the lock allows") as caught:
        chosen(index.pip, locked(wheel("tool")))
    assert "sqshforge lock" in caught.value.fix


def test_each_package_has_its_file_in_the_order_of_the_lock(new_index: NewIndex) -> None:
    both = wheel("zlib-ng", "2.0"), wheel("a.tool", "1.5")
    index = new_index(*both, wheel("a.tool", "1.6"))
    packages = [one.locked() for one in both]
    assert chosen(index.pip, *packages) == [one.name for one in both]
    assert chosen(index.pip) == []


def test_a_version_that_is_gone_is_reported(new_index: NewIndex) -> None:
    index = new_index(wheel("tool", "2.0"))
    with pytest.raises(MissingError, match=r"tool==1\.0") as caught:
        chosen(index.pip, locked(wheel("tool")))
    assert "docs/start/machines.md" in caught.value.fix


def test_an_index_that_does_not_answer_is_reported(new_index: NewIndex) -> None:
    index = new_index(wheel("tool"))
    index.web.stop()
    with pytest.raises(MissingError, match="the package index does not have") as caught:
        chosen(index.pip, locked(wheel("tool")))
    assert caught.value.where == index.url
    assert caught.value.exit_code == 3


def test_a_cache_that_uv_cannot_write_is_no_fault_of_the_index(
    new_index: NewIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache" / "uv"))
    with pytest.raises(MissingError, match="uv cannot look for packages"):
        chosen(new_index(wheel("tool")).pip, locked(wheel("tool")))


def test_an_index_may_take_a_password(new_index: NewIndex, tmp_path: Path) -> None:
    index = new_index(wheel("tool"))
    index.web.password = "user:secret"
    pip = Pip(index=index.url.replace("//", "//user:secret@"))
    (file,) = found(pip, wheel("tool").locked())
    tracker = Tracker(file.name, None, "bytes")
    assert download(file.url, tmp_path / file.name, file.sha256, pip, tracker) == file.sha256


def test_a_folder_of_wheels_is_as_good_as_an_index(new_index: NewIndex, tmp_path: Path) -> None:
    one = wheel("tool", tag=FITTING[0])
    (tmp_path / one.name).write_bytes(one.data)
    pip = Pip(index=new_index().url, find_links=(str(tmp_path),))
    (file,) = found(pip, locked(one))
    assert file.url == (tmp_path / one.name).as_uri()


def test_no_python_is_downloaded_to_find_the_files_of_another(
    new_index: NewIndex, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", web.url)
    assert chosen(new_index(wheel("tool")).pip, wheel("tool").locked())
    assert web.asked == []


def test_what_is_found_can_be_installed(new_index: NewIndex, tmp_path: Path) -> None:
    index = new_index(*wheels(FITTING))
    (file,) = found(index.pip, locked(wheel("tool")))
    argv = [sys.executable, "-m", "pip", "--isolated", "install", "--no-deps", "--no-index"]
    argv += ["--target", str(tmp_path / "site"), f"{file.url}#sha256={file.sha256}"]
    assert Programs().attempt(argv).code == 0
    assert (tmp_path / "site" / "tool.py").is_file()
