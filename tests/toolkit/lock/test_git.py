"""Sources by their commit: resolved, fetched, and the same bytes wherever they are fetched."""

from __future__ import annotations

import re
import socket
import ssl
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sqshforge.errors import MissingError, WorkError
from sqshforge.host.files import sha256
from sqshforge.host.programs import Programs
from sqshforge.lock import git
from sqshforge.lock.model import LockedSource
from tests.support.web_servers import Web
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import web_fixture as web_fixture

pytestmark = pytest.mark.processes

WHO = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "A"), ("EMAIL", "a@example.test"), ("DATE", "1000000000 +0000"))
}
WHO |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}


@dataclass(frozen=True)
class Upstream:
    """Somebody else's repository."""

    folder: Path

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def git(self, *words: str) -> str:
        return Programs().capture(["git", "-C", self.folder, *words], env=WHO).strip()

    def commit(self, text: str, **more: str) -> str:
        for name, content in {"file": text, **more}.items():
            (self.folder / name).write_text(content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", text)
        return self.git("rev-parse", "HEAD")

    def rewrite(self) -> None:
        """Remove the last commit, as a forced push and the host's next garbage collection do."""
        self.git("reset", "--quiet", "--hard", "HEAD^")
        self.git("reflog", "expire", "--expire=now", "--all")
        self.git("gc", "--quiet", "--prune=now")


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    made = Upstream(tmp_path / "upstream")
    made.folder.mkdir()
    made.git("init", "--quiet", "--initial-branch", "main")
    made.commit("before")
    return made


@pytest.fixture(params=["any commit", "tips only"])
def gives(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The commits that a host serves by name: with git's old protocol, only tags and branches."""
    if request.param == "tips only":
        (tmp_path / "gitconfig").write_text("[protocol]\nversion = 0\n")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    return str(request.param)


def snapshot(
    upstream: Upstream, folder: Path, ref: str = "main", commit: str | None = None
) -> tuple[Path, str]:
    source = LockedSource(name="tool", git="https://example.test/tool", ref=ref, commit=commit)
    return git.snapshot(source, upstream.url, folder, Programs())


def text(tar: Path) -> str:
    """Return the content of the tar's file."""
    with tarfile.open(tar) as archive:
        member = archive.extractfile("file")
        assert member is not None
        return member.read().decode()


@pytest.mark.parametrize("how", [["v1"], ["--annotate", "--message", "one", "v1"]])
def test_a_tag_is_at_its_commit_and_not_at_itself(how: list[str], upstream: Upstream) -> None:
    commit = upstream.commit("one")
    upstream.git("tag", *how)
    upstream.commit("two")
    assert git.commit_of(upstream.url, "v1", Programs()) == commit


def test_a_branch_is_at_its_last_commit(upstream: Upstream) -> None:
    upstream.git("switch", "--quiet", "--create", "release/1.x")
    commit = upstream.commit("one")
    upstream.git("switch", "--quiet", "main")
    assert git.commit_of(upstream.url, "release/1.x", Programs()) == commit


def test_a_name_that_is_neither_is_no_commit(upstream: Upstream) -> None:
    upstream.git("tag", "v1.2")
    assert git.commit_of(upstream.url, "v1", Programs()) == ""
    assert git.commit_of(f"{upstream.url}-not", "main", Programs()) is None


@contextmanager
def https(folder: Path, certificate: Path) -> Iterator[str]:
    """Run a host that serves the files of a folder, with a certificate that no system trusts."""
    key = certificate.with_suffix(".key")
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    Programs().capture([*argv, "-out", certificate])
    handler = partial(Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_git_trusts_whom_the_machine_trusts_unless_it_has_its_own(
    upstream: Upstream, direct: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.git("update-server-info")
    commit = upstream.git("rev-parse", "HEAD")
    monkeypatch.delenv("GIT_SSL_CAINFO", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    ca = tmp_path / "ca.crt"
    with https(upstream.folder / ".git", ca) as url:
        assert git.commit_of(url, "main", Programs()) is None
        assert git.commit_of(url, "main", Programs(), ca) == commit
        (tmp_path / "gitconfig").write_text(f'[http "{url}"]\nsslCAInfo = {tmp_path}/none\n')
        assert git.commit_of(url, "main", Programs(), ca) is None


@pytest.mark.parametrize("how", [["v1"], ["--annotate", "--message", "one", "v1"]])
def test_a_tag_is_fetched_at_the_locked_commit(
    how: list[str], gives: str, upstream: Upstream, tmp_path: Path
) -> None:
    commit = upstream.commit("one")
    upstream.git("tag", *how)
    upstream.commit("two")
    tar, fetched = snapshot(upstream, tmp_path / "at", "v1", commit)
    assert (text(tar), fetched) == ("one", commit)
    assert list((tmp_path / "at").iterdir()) == [tar]


def test_without_a_locked_commit_it_is_what_the_branch_is_at(
    upstream: Upstream, tmp_path: Path
) -> None:
    commit = upstream.commit("one")
    tar, fetched = snapshot(upstream, tmp_path / "at")
    assert (text(tar), fetched) == ("one", commit)
    later = upstream.commit("two")
    assert snapshot(upstream, tmp_path / "at")[1] == later


def test_a_branch_that_went_on_still_gives_the_locked_commit(
    gives: str, upstream: Upstream, tmp_path: Path
) -> None:
    commit = upstream.commit("one")
    upstream.commit("two")
    tar, fetched = snapshot(upstream, tmp_path / "at", commit=commit)
    assert (text(tar), fetched) == ("one", commit)


def test_a_branch_that_was_rewritten_is_reported_with_the_commit(
    gives: str, upstream: Upstream, tmp_path: Path
) -> None:
    commit = upstream.commit("one")
    upstream.rewrite()
    with pytest.raises(
        WorkError, match=f"commit {commit} is no longer in the history of main"
    ) as caught:
        snapshot(upstream, tmp_path / "at", commit=commit)
    assert len(caught.value.what.splitlines()) == 1
    assert "sqshforge lock" in caught.value.fix
    assert not list((tmp_path / "at").glob("*.tar*"))
    assert snapshot(upstream, tmp_path / "at")[1] == upstream.git("rev-parse", "HEAD")


@pytest.mark.parametrize("how", [["v1"], ["--annotate", "--message", "one", "v1"]])
def test_a_tag_that_moved_is_reported_with_both_commits(
    how: list[str], upstream: Upstream, tmp_path: Path
) -> None:
    before = upstream.commit("one")
    now = upstream.commit("two")
    upstream.git("tag", *how)
    with pytest.raises(WorkError, match="the tag v1 of tool has moved") as caught:
        snapshot(upstream, tmp_path / "at", "v1", before)
    assert f"locked  {before}\n" in caught.value.what
    assert caught.value.what.endswith(f"now at  {now}")
    assert caught.value.exit_code == 1


def test_one_commit_makes_one_tar(
    gives: str, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = "$Format:%H %h %P %D$"
    attributes = "file text\nstamp export-subst\n"
    commit = upstream.commit("one\n", stamp=stamp, **{".gitattributes": attributes})
    first, _ = snapshot(upstream, tmp_path / "first", commit=commit)
    upstream.commit("two")
    settings = tmp_path / "gitconfig"
    settings.write_text(
        (settings.read_text() if settings.exists() else "")
        + "[core]\nautocrlf = true\neol = crlf\nabbrev = 12\n"
        f"attributesFile = {tmp_path}/attributes\n[tar]\numask = 0077\n"
    )
    (tmp_path / "attributes").write_text("* ident export-ignore\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    second, _ = snapshot(upstream, tmp_path / "second", commit=commit)
    assert text(second) == "one\n"
    assert sha256(first) == sha256(second)


def test_an_unknown_name_is_reported_with_the_page_on_mirrors(
    upstream: Upstream, tmp_path: Path
) -> None:
    with pytest.raises(
        MissingError, match="tool cannot be fetched: its host does not know v9"
    ) as e:
        snapshot(upstream, tmp_path / "at", "v9")
    assert e.value.where == upstream.url
    assert "docs/images/offline.md" in e.value.fix
    assert not (tmp_path / "at").exists()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a host that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/tool"


def test_a_host_that_does_not_answer_is_reported_with_the_page_on_mirrors(
    web: Web, tmp_path: Path
) -> None:
    web.stop()
    source = LockedSource(name="tool", git="https://example.test/tool", ref="main", commit=None)
    address = web.url.replace("//", "//user:secret@")
    with pytest.raises(MissingError, match="does not answer") as caught:
        git.snapshot(source, f"{address}/tool", tmp_path / "at", Programs())
    assert "docs/images/offline.md" in caught.value.fix
    assert "secret" not in "\n".join(caught.value.lines())


def test_a_host_that_says_nothing_is_not_waited_for(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git, "TIMEOUT", 0.5)
    assert git.commit_of(silent, "main", Programs()) is None


def test_a_host_that_falls_silent_in_the_middle_is_given_up(
    upstream: Upstream, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = git.QUIET
    monkeypatch.setitem(quiet, "GIT_HTTP_LOW_SPEED_TIME", "1")
    commit = upstream.commit("one")
    upstream.git("update-server-info")
    for name in ("HEAD", "info/refs"):
        web.files[f"/tool/{name}"] = (upstream.folder / ".git" / name).read_bytes()
    web.files["/tool/info/refs?service=git-upload-pack"] = web.files["/tool/info/refs"]
    web.silent = "/tool/objects/"
    source = LockedSource(name="tool", git="https://example.test/t", ref="main", commit=commit)
    with pytest.raises(MissingError, match="git cannot fetch main"):
        git.snapshot(source, f"{web.url}/tool", tmp_path / "at", Programs())


def test_what_an_interrupted_fetch_left_does_not_stand_in_the_way(
    upstream: Upstream, tmp_path: Path
) -> None:
    commit = upstream.commit("one")
    whole, _ = snapshot(upstream, tmp_path / "whole", commit=commit)
    left = tmp_path / "at" / whole.name
    half = left.with_suffix(".git")
    (half / "objects").mkdir(parents=True)
    (half / "shallow.lock").touch()
    (half / "HEAD").touch()
    left.with_name(f"{left.name}.part").write_bytes(b"half")
    tar, _ = snapshot(upstream, tmp_path / "at", commit=commit)
    assert sha256(tar) == sha256(whole)
    assert list((tmp_path / "at").iterdir()) == [tar]


def test_a_tar_that_cannot_be_written_is_not_taken_for_a_rewritten_branch(
    upstream: Upstream, tmp_path: Path
) -> None:
    commit = upstream.commit("one")
    (tmp_path / "at" / f"tool-{commit}.tar.part").mkdir(parents=True)
    with pytest.raises(WorkError, match="Is a directory"):
        snapshot(upstream, tmp_path / "at", commit=commit)


def test_what_is_there_is_not_fetched_again(upstream: Upstream, tmp_path: Path) -> None:
    commit = upstream.commit("one")
    first = snapshot(upstream, tmp_path / "at", commit=commit)
    upstream.folder.rename(tmp_path / "gone")
    assert snapshot(upstream, tmp_path / "at", commit=commit) == first
    assert re.fullmatch(rf"tool-{commit}\.tar", first[0].name)
