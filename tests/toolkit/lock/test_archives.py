"""Locks of archives: the checksum of what one of their addresses returns, kept for the same pin."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sqshforge import lock
from sqshforge.host.files import sha256
from sqshforge.host.programs import Programs, Result
from tests.support.web_servers import Index, Web
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture
from tests.support.web_servers import web_fixture as web_fixture
from tests.toolkit.lock.test_resolving import ARCHIVE, GIT, repository, resolved
from tests.toolkit.lock.test_resolving import index as index

pytestmark = pytest.mark.processes


def test_an_archive_keeps_its_sum_while_its_host_is_silent_and_its_pin_the_same(
    index: Index, tmp_path: Path
) -> None:
    (tmp_path / "data.tar.gz").write_bytes(b"data")
    before = resolved(tmp_path, index, archives={"data": {"url": ARCHIVE}})
    assert [one.sha256 for one in before.archives] == [sha256(tmp_path / "data.tar.gz")]
    (tmp_path / "data.tar.gz").unlink()
    kept = resolved(tmp_path, index, before, archives={"data": {"url": ARCHIVE}})
    assert lock.changes(before, kept) == []
    other = ARCHIVE.replace("data.", "data2.")
    dropped = resolved(tmp_path, index, before, archives={"data": {"url": other}})
    assert [one.sha256 for one in dropped.archives] == [None]
    assert f"archive data, {other}: its host did not answer" in dropped.unlocked


def test_an_archive_that_was_changed_is_locked_by_the_sum_in_the_recipe(
    index: Index, tmp_path: Path
) -> None:
    place = tmp_path / "data.tar.gz"
    place.write_bytes(b"data")
    before = resolved(tmp_path, index, archives={"data": {"url": ARCHIVE}})
    place.write_bytes(b"changed")
    kept = resolved(tmp_path, index, before, archives={"data": {"url": ARCHIVE}})
    assert kept.archives == before.archives
    pinned = {"data": {"url": ARCHIVE, "sha256": sha256(place)}}
    changed = resolved(tmp_path, index, before, archives=pinned)
    assert [one.sha256 for one in changed.archives] == [sha256(place)]


def test_another_address_with_the_same_file_name_is_another_archive(
    index: Index, tmp_path: Path
) -> None:
    urls = []
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "data.tar.gz").write_text(version)
        urls.append(ARCHIVE.replace("data.", f"{version}/data."))
    first = resolved(tmp_path, index, archives={"data": {"url": urls[0]}})
    built = tmp_path / "build" / "vendor" / "small" / "archives"
    built.mkdir(parents=True)
    shutil.copy(tmp_path / "v1" / "data.tar.gz", built)
    second = resolved(tmp_path, index, first, archives={"data": {"url": urls[1]}})
    assert [one.sha256 for one in second.archives] == [sha256(tmp_path / "v2" / "data.tar.gz")]


def test_an_archive_is_locked_from_the_first_address_that_answers(
    index: Index, tmp_path: Path
) -> None:
    (tmp_path / "data.tar.gz").write_bytes(b"data")
    gone = ARCHIVE.replace("data.", "gone.")
    locked = resolved(tmp_path, index, archives={"data": {"url": gone, "mirrors": [ARCHIVE]}})
    assert [one.sha256 for one in locked.archives] == [sha256(tmp_path / "data.tar.gz")]
    fewer = resolved(tmp_path, index, locked, archives={"data": {"url": gone}})
    assert lock.changes(locked, fewer) == []  # another way to the same file is not another pin
    lost = ARCHIVE.replace("data.", "lost.")
    silent = {"url": lost, "mirrors": [f"{lost}-2"]}
    unlocked = resolved(tmp_path, index, archives={"other": silent}).unlocked
    assert f"archive other, {lost}, {lost}-2: their hosts did not answer" in unlocked


def test_a_host_that_answers_and_does_not_give_it_is_not_said_to_be_silent(
    index: Index, web: Web, tmp_path: Path
) -> None:
    repository(tmp_path / "tool")
    gone, mirror = f"{web.url}/gone.tar.gz", f"{web.url}/mirror.tar.gz"
    silent = "http://127.0.0.1:1/gone.tar.gz"
    found = resolved(
        tmp_path,
        index,
        sources={"tool": {"git": GIT, "ref": "v2"}},
        archives={
            "one": {"url": gone},
            "two": {"url": mirror, "mirrors": [gone]},
            "three": {"url": f"{web.url}/three.tar.gz", "mirrors": [silent]},
        },
    )
    assert sorted(found.unlocked[1:]) == [
        f"archive one, {gone}: its host did not give it",
        f"archive three, {web.url}/three.tar.gz, {silent}: their hosts did not answer",
        f"archive two, {mirror}, {gone}: their hosts did not give it",
        f"source tool, {GIT} at v2: its repository has no such tag or branch",
    ]


@pytest.mark.parametrize(
    ("code", "said"), [(100, "is not signed"), (0, "Unable to locate package libfoo")]
)
def test_an_archive_of_debian_s_that_apt_cannot_use_is_reported_in_apt_s_words(
    code: int, said: str, index: Index, tmp_path: Path
) -> None:
    """It may be trusted only through a key or a setting in this machine's own sources."""

    class Unsigned(Programs):
        def which(self, program: str) -> Path | None:
            return Path("/usr/bin", program)

        def attempt(self, argv: Sequence[str | Path], **given: Any) -> Result:
            if "indextargets" in argv:
                return Result((), 0, "http://deb.test/ bookworm main\n", "")
            if "update" in argv or "install" in argv:
                return Result((), code or "install" in argv, "", f"W: first\nE: {said}\nE: more\n")
            return super().attempt(argv, **given)

    bootstrap = {"image": "host.test/x:1", "bootstrap": {"suite": "bookworm"}}
    locked = resolved(tmp_path, index, programs=Unsigned(), base=bootstrap, apt=["libfoo"])
    assert locked.apt is None
    assert (
        f"apt packages: apt has no versions from this machine's archive of bookworm: {said}"
        in locked.unlocked
    )
