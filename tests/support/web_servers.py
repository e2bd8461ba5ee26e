"""Loopback web servers: files, and package indexes with small made-up packages.

Each records its requests, and can be stopped in the middle of a test.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from sqshforge import recipe
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Asked, Lock, LockedPackage
from sqshforge.network.access import Pip
from sqshforge.network.mirrors import Mirrors
from sqshforge.project import Project
from sqshforge.recipe import Recipe, normalize

HTML, JSON = "text/html", "application/vnd.pypi.simple.v1+json"  # PEP 503, PEP 691


@dataclass
class Web:
    """A web server: its content, its misbehavior, and each path and range requested from it."""

    http: ThreadingHTTPServer
    files: dict[str, bytes] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # the Content-Type of a path
    has_ranges: bool = True
    code: int = 200  # the status of every answer, if not the usual one
    password: str = ""  # USER:PASSWORD that it requires
    silent: str | None = None  # it accepts requests below this path, but never answers them
    over: threading.Event = field(default_factory=threading.Event)
    cuts: list[int] = field(default_factory=list)  # bytes at which the next answers break off, each
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def stop(self) -> None:
        """Stop answering at this address from now on."""
        self.over.set()
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serving() -> Iterator[Web]:
    """Run a web server for the length of a block."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            with suppress(ConnectionError):  # the client has hung up
                self.answer()

        def answer(self) -> None:
            wanted = self.headers.get("Range", "")
            web.asked.append((self.path, wanted))
            if web.silent and self.path.startswith(web.silent):
                web.over.wait()
            data = web.files.get(self.path)
            secret = base64.b64encode(web.password.encode()).decode()
            if web.password and self.headers.get("Authorization") != f"Basic {secret}":
                self.send_error(401)
            elif data is None or web.code != 200:
                self.send_error(404 if web.code == 200 else web.code)
            elif wanted and web.has_ranges:
                self.send_part(data, *_span(wanted, len(data)))
            else:
                self.send_body(200, data)

        def send_part(self, data: bytes, start: int, end: int) -> None:
            if start >= len(data):
                self.send_error(416)
            else:
                place = f"bytes {start}-{end - 1}/{len(data)}"
                self.send_body(206, data[start:end], {"Content-Range": place})

        def send_body(
            self, code: int, body: bytes, headers: Mapping[str, str] | None = None
        ) -> None:
            self.send_response(code)
            kind = web.kinds.get(self.path, "application/octet-stream")
            ranges = "bytes" if web.has_ranges else "none"
            facts = {"Content-Type": kind, "Accept-Ranges": ranges, "Cache-Control": "no-store"}
            facts |= headers or {}
            for key, value in {**facts, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: web.cuts.pop(0)] if web.cuts else body)

        do_GET = do_HEAD = reply  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    web = Web(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    thread = threading.Thread(target=web.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        web.stop()
        thread.join()


def _span(wanted: str, length: int) -> tuple[int, int]:
    """Return where a range starts and ends: "bytes=A-B", "bytes=A-", or "bytes=-N", the last N."""
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, length - int(last)), length
    return int(first), min(length, int(last) + 1) if last else length


@dataclass(frozen=True)
class Distribution:
    """A wheel or source distribution in an index."""

    project: str
    version: str
    name: str
    data: bytes
    python: str = ""  # the Python that its index says it needs, such as ">=3.11"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def locked(self) -> LockedPackage:
        """Return the package as in a lock that knows only this file."""
        return LockedPackage(
            name=normalize(self.project), version=self.version, hashes=(f"sha256:{self.sha256}",)
        )


def wheel(
    project: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    needs: Sequence[str] = (),
    says: str = "",
    python: str = "",
) -> Distribution:
    """Make a wheel with one module, named like the project, whose SAYS is `says`."""
    module = normalize(project).replace("-", "_")
    facts = f"{module}-{version}.dist-info"
    contents = {
        f"{module}.py": f"SAYS = {says!r}\n",
        f"{facts}/METADATA": _metadata(project, version, needs),
        f"{facts}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    contents[f"{facts}/RECORD"] = "".join(f"{name},,\n" for name in (*contents, f"{facts}/RECORD"))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in contents.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    name = f"{module}-{version}-{tag}.whl"
    return Distribution(project, version, name, data.getvalue(), python)


def sdist(project: str, version: str = "1.0") -> Distribution:
    """Make a source distribution with only its name and version."""
    stem = f"{normalize(project).replace('-', '_')}-{version}"
    text = _metadata(project, version, ()).encode()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        member = tarfile.TarInfo(f"{stem}/PKG-INFO")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return Distribution(project, version, f"{stem}.tar.gz", data.getvalue())


def _metadata(project: str, version: str, needs: Sequence[str]) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {version}"]
    return "".join(f"{line}\n" for line in [*lines, *(f"Requires-Dist: {one}" for one in needs)])


@dataclass
class Index:
    """A simple index of packages, with their checksums, in either of its formats."""

    web: Web
    kind: str = HTML
    has: list[Distribution] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.web.url}/simple"

    @property
    def pip(self) -> Pip:
        """Pip configured with only this index."""
        return Pip(index=self.url)

    @property
    def asked(self) -> set[str]:
        """The projects that it was asked for."""
        paths = (path.split("/") for path, _ in self.web.asked)
        return {steps[2] for steps in paths if steps[1] == "simple"}

    def add(self, *distributions: Distribution) -> None:
        self.has += distributions
        for one in distributions:
            self.web.files[f"/files/{one.name}"] = one.data
            page = f"/simple/{normalize(one.project)}/"
            self.web.kinds[page] = self.kind
            self.web.files[page] = self._page(normalize(one.project)).encode()

    def _page(self, project: str) -> str:
        files = [one for one in self.has if normalize(one.project) == project]
        if self.kind == HTML:
            takes = {f: f' data-requires-python="{escape(f.python)}"' for f in files if f.python}
            links = (
                f'<a href="../../files/{f.name}#sha256={f.sha256}"{takes.get(f, "")}>{f.name}</a>'
                for f in files
            )
            return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
        listed = [
            {
                "filename": f.name,
                "url": f"../../files/{f.name}",
                "hashes": {"sha256": f.sha256},
                "requires-python": f.python or None,
            }
            for f in files
        ]
        return json.dumps({"meta": {"api-version": "1.0"}, "name": project, "files": listed})


def small_recipe(
    folder: Path,
    packages: Sequence[str],
    indexes: Mapping[str, object] | None = None,
    **parts: Any,
) -> Recipe:
    """Write a recipe for these packages and Python 3.10, with a base that no registry has.

    `parts` are other keys of the recipe; its `python` is merged into the default one.
    """
    python = {"version": "3.10", "installer": "pip==25.3", "packages": list(packages)}
    python |= parts.pop("python", {})
    facts = {
        "target": "small",
        "title": "a test",
        "accelerator": "cpu",
        "base": {"image": "127.0.0.1:1/base:1"},
        "python": {**python, "indexes": dict(indexes or {})},
        "disk_gb": 1,
        **parts,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(facts))
    return recipe.load(path)


def asking(
    folder: Path,
    pip: Pip,
    mirrors: Mirrors | None = None,
    before: Lock | None = None,
    programs: Programs | None = None,
    parent: Lock | None = None,
) -> Asked:
    """Return the services that a lock is resolved with."""
    return Asked(
        project=Project(folder),
        pip=pip,
        mirrors=mirrors or Mirrors(),
        programs=programs or Programs(),
        reporter=Reporter(quiet=True),
        before=before,
        parent=parent,
    )


@pytest.fixture(name="direct")
def direct_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep any proxy of this machine from standing between a test and its servers."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture(name="web")
def web_fixture(direct: None) -> Iterator[Web]:
    with serving() as web:
        yield web


@pytest.fixture(name="new_index")
def new_index_fixture(
    direct: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Index]]:
    """A function that makes a new index on each call; uv does not retry if one does not answer."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with ExitStack() as stack:

        def new(*distributions: Distribution, kind: str = HTML) -> Index:
            index = Index(stack.enter_context(serving()), kind)
            index.add(*distributions)
            return index

        yield new
