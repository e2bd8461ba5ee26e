"""Downloads: complete or absent, resumed where they were cut, and verified by checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.terminal import Tracker
from sqshforge.network import download
from sqshforge.network.access import Pip
from tests.support.web_servers import Web
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import web_fixture as web_fixture

NAME = "data.tar.gz"
PATH = f"/{NAME}"
DATA = hashlib.shake_256(b"data").digest(3 << 20)
SUM = hashlib.sha256(DATA).hexdigest()
HALF = len(DATA) // 2
REST = f"bytes={HALF}-"


@pytest.fixture
def host(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """A host with the file, and no delay before a broken connection is resumed."""
    monkeypatch.setattr(download, "PAUSE", 0)
    web.files[PATH] = DATA
    return web


def tracker() -> Tracker:
    return Tracker(NAME, None, "bytes")


def fetched(url: str, place: Path, wanted: str | None = SUM) -> str:
    return download.download(url, place, wanted, Pip(), tracker())


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("wanted", [SUM, None])
def test_a_file_comes_whole_and_its_sum_is_reported(
    wanted: str | None, host: Web, tmp_path: Path
) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    assert fetched(host.url + PATH, folder / NAME, wanted) == SUM
    assert (folder / NAME).read_bytes() == DATA
    assert left(folder) == [NAME]


def test_progress_begins_with_what_is_there_and_reaches_the_total(
    host: Web, tmp_path: Path
) -> None:
    class Noting(Tracker):
        def redraw(self) -> None:
            seen.append((self.done, self.total))

    seen: list[tuple[float, float | None]] = []
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:HALF])
    download.download(host.url + PATH, tmp_path / NAME, SUM, Pip(), Noting(NAME, None, "bytes"))
    assert [seen[0], seen[-1]] == [(HALF, len(DATA)), (len(DATA), len(DATA))]
    assert seen == sorted(seen)


@pytest.mark.parametrize("wanted", [SUM, None])
def test_a_cut_connection_is_taken_up_where_it_was_cut(
    wanted: str | None, host: Web, tmp_path: Path
) -> None:
    host.cuts = [HALF, 1000]
    assert fetched(host.url + PATH, tmp_path / NAME, wanted) == SUM
    assert host.asked == [(PATH, ""), (PATH, REST), (PATH, f"bytes={HALF + 1000}-")]
    assert left(tmp_path) == [NAME]


def test_what_a_killed_process_left_is_gone_on_with(host: Web, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:HALF])
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert host.asked == [(PATH, REST)]


def test_a_part_that_was_complete_is_taken_as_it_is(host: Web, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA)
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert left(tmp_path) == [NAME]


def test_a_host_that_knows_no_ranges_sends_it_all_again(host: Web, tmp_path: Path) -> None:
    host.has_ranges = False
    host.cuts = [HALF]
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert (tmp_path / NAME).read_bytes() == DATA


@pytest.mark.parametrize("part", [b"\0" * HALF, b"\0" * (len(DATA) + 1)])
def test_a_damaged_part_is_no_alarm_and_is_fetched_anew(
    part: bytes, host: Web, tmp_path: Path
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(part)
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert host.asked[-1] == (PATH, "")


def test_a_part_that_no_sum_can_prove_is_not_gone_on_with(host: Web, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"of another version")
    assert fetched(host.url + PATH, tmp_path / NAME, None) == SUM


def test_a_host_that_cuts_again_and_again_is_reported_and_what_came_stays(
    host: Web, tmp_path: Path
) -> None:
    host.cuts = [1000] * 4
    with pytest.raises(MissingError, match="the connection was cut after 4000 bytes"):
        fetched(host.url + PATH, tmp_path / NAME)
    assert left(tmp_path) == [f"{NAME}.part"]
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert host.asked[-1] == (PATH, "bytes=4000-")


def test_a_full_disk_is_no_fault_of_the_network(host: Web, tmp_path: Path) -> None:
    part = tmp_path / f"{NAME}.part"
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        fetched(host.url + PATH, tmp_path / NAME)
    assert caught.value.filename == str(part)
    assert len(host.asked) == 1


def test_a_part_that_cannot_be_written_is_named(host: Web, tmp_path: Path) -> None:
    part = tmp_path / f"{NAME}.part"
    part.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        fetched(host.url + PATH, tmp_path / NAME)
    assert caught.value.filename == str(part)


def test_a_wrong_sum_is_reported_with_both_and_nothing_stays(host: Web, tmp_path: Path) -> None:
    host.files[PATH] = b"something else"
    with pytest.raises(WorkError, match="another checksum than the lock says") as caught:
        fetched(host.url + PATH, tmp_path / NAME)
    assert SUM in caught.value.what
    assert hashlib.sha256(b"something else").hexdigest() in caught.value.what
    assert caught.value.where == host.url + PATH
    assert "as archives.NAME.sha256 in the recipe, then sqshforge lock TARGET" in caught.value.fix
    assert left(tmp_path) == []


@pytest.mark.parametrize(("code", "says"), [(404, "404 Not Found"), (503, "503 Service")])
def test_what_the_host_does_not_give_is_reported_and_nothing_stays(
    code: int, says: str, host: Web, tmp_path: Path
) -> None:
    host.code = code
    with pytest.raises(MissingError, match=f"the host answers {says}") as caught:
        fetched(host.url + PATH, tmp_path / NAME)
    assert caught.value.where == host.url + PATH
    assert "docs/images/offline.md" in caught.value.fix
    assert left(tmp_path) == []


def test_a_host_that_does_not_answer_is_reported_and_nothing_stays(
    host: Web, tmp_path: Path
) -> None:
    host.stop()
    with pytest.raises(MissingError, match="Connection refused") as caught:
        fetched(host.url + PATH, tmp_path / NAME)
    assert len(caught.value.what.splitlines()) == 1
    assert left(tmp_path) == []


def test_a_host_that_is_gone_does_not_cost_what_has_come(host: Web, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:HALF])
    host.stop()
    with pytest.raises(MissingError, match="Connection refused"):
        fetched(host.url + PATH, tmp_path / NAME)
    assert (tmp_path / f"{NAME}.part").read_bytes() == DATA[:HALF]


def test_a_mirror_may_take_a_password_which_is_never_shown(host: Web, tmp_path: Path) -> None:
    host.password = "user:s/e@cret"
    url = host.url.replace("//", "//user:s%2Fe%40cret@") + PATH
    assert fetched(url, tmp_path / NAME) == SUM
    host.code = 404
    with pytest.raises(MissingError) as caught:
        fetched(url, tmp_path / "other")
    assert "cret" not in "\n".join(caught.value.lines())


def test_a_proxy_of_pip_s_is_asked(host: Web, tmp_path: Path) -> None:
    url = "http://host.test/file"
    host.files[url] = DATA
    pip = Pip(proxy=host.url.removeprefix("http://"))
    assert download.download(url, tmp_path / NAME, SUM, pip, tracker()) == SUM


def test_a_folder_is_as_good_as_a_host(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "the file").write_bytes(DATA)
    url = (tmp_path / "from" / "the file").as_uri()
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:HALF])
    assert fetched(url, tmp_path / NAME) == SUM
    assert (tmp_path / NAME).read_bytes() == DATA
    with pytest.raises(MissingError, match="No such file"):
        fetched(f"{url}-not", tmp_path / "other")
    assert left(tmp_path) == [NAME, "from"]


def test_a_folder_s_plain_path_is_as_good_as_its_address(tmp_path: Path) -> None:
    (tmp_path / "a b%20").write_bytes(DATA)
    assert fetched(str(tmp_path / "a b%20"), tmp_path / NAME) == SUM


def test_letters_that_an_address_may_not_have_are_escaped(host: Web, tmp_path: Path) -> None:
    host.files["/%C3%A9%20%C3%A9"] = DATA
    assert fetched(f"{host.url}/\u00e9%20\u00e9", tmp_path / NAME) == SUM


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://user:secret@[::1/x", "Invalid IPv6 URL"),
        (f"http://{'x' * 64}.test/x", "label"),
        ("mirror/x", "unknown url type"),
    ],
)
def test_what_is_no_address_is_reported(url: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        fetched(url, tmp_path / NAME)
    assert caught.value.where == url.replace("user:secret@", "")
    assert left(tmp_path) == []


def test_a_file_that_is_there_is_not_asked_for(host: Web, tmp_path: Path) -> None:
    fetched(host.url + PATH, tmp_path / NAME)
    host.stop()
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert fetched(host.url + PATH, tmp_path / NAME, None) == SUM


def test_a_file_of_an_earlier_lock_is_replaced(host: Web, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"of an earlier lock")
    assert fetched(host.url + PATH, tmp_path / NAME) == SUM
    assert (tmp_path / NAME).read_bytes() == DATA
    assert left(tmp_path) == [NAME]


@pytest.mark.parametrize("damage", ["gone", "wrong"])
def test_a_file_stays_until_a_better_one_has_come(damage: str, host: Web, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"of an earlier lock")
    host.files[PATH] = b"something else"
    if damage == "gone":
        host.stop()
    with pytest.raises(MissingError if damage == "gone" else WorkError) as caught:
        fetched(host.url + PATH, tmp_path / NAME)
    assert caught.value.where == host.url + PATH
    assert (tmp_path / NAME).read_bytes() == b"of an earlier lock"
    assert left(tmp_path) == [NAME]


def test_the_next_address_is_tried_where_one_does_not_give_the_file(
    host: Web, tmp_path: Path
) -> None:
    urls = [f"{host.url}/moved/{NAME}", host.url + PATH]
    assert download.download_from(urls, tmp_path / NAME, SUM, Pip(), tracker()) == SUM
    assert [path for path, _ in host.asked] == [f"/moved/{NAME}", PATH]
    assert left(tmp_path) == [NAME]


def test_what_one_address_began_another_goes_on_with(host: Web, tmp_path: Path) -> None:
    host.files["/first"] = DATA
    host.cuts = [1000] * 4
    urls = [f"{host.url}/first", host.url + PATH]
    assert download.download_from(urls, tmp_path / NAME, SUM, Pip(), tracker()) == SUM
    assert host.asked[-1] == (PATH, "bytes=4000-")


def test_where_no_address_answers_the_error_names_them_all(host: Web, tmp_path: Path) -> None:
    urls = [f"{host.url}/one", f"{host.url}/two", (tmp_path / "three").as_uri()]
    with pytest.raises(MissingError, match="from any of its 3 addresses") as caught:
        download.download_from(urls, tmp_path / NAME, SUM, Pip(), tracker())
    lines = caught.value.lines()
    assert f"    {urls[0]}: the host answers 404 Not Found" in lines
    assert all(any(url in line for line in lines) for url in urls)
    assert "docs/images/offline.md" in caught.value.fix
    assert left(tmp_path) == []


def test_one_address_alone_is_reported_as_ever(host: Web, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="cannot be fetched: the host answers 404") as caught:
        download.download_from([f"{host.url}/one"], tmp_path / NAME, SUM, Pip(), tracker())
    assert caught.value.where == f"{host.url}/one"


def test_a_wrong_file_is_reported_and_not_looked_for_elsewhere(host: Web, tmp_path: Path) -> None:
    host.files["/first"] = b"something else"
    urls = [f"{host.url}/first", host.url + PATH]
    with pytest.raises(WorkError, match="another checksum") as caught:
        download.download_from(urls, tmp_path / NAME, SUM, Pip(), tracker())
    assert caught.value.where == urls[0]
