"""The machine's configuration, and what of it reaches a build."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from sqshforge.network import access


@pytest.mark.processes
def test_pip_is_asked_so_that_files_and_environment_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://user:secret@example.test/simple\ntimeout = 7\n"
        f"find-links = {tmp_path}\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "PIP_TIMEOUT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://one.test/a file:///srv/wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} https://two.test/links")
    found = access.pip(Programs())
    assert found.index == "https://user:secret@example.test/simple"
    assert found.extra_indexes == ("https://one.test/a", "file:///srv/wheels")
    assert found.find_links == (str(tmp_path), "https://two.test/links")
    assert found.remote().splitlines() == [
        "[global]",
        "index-url = https://user:secret@example.test/simple",
        "extra-index-url =",
        "    https://one.test/a",
        "find-links =",
        "    https://two.test/links",
        "timeout = 7",
    ]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["index-url", "extra-index-url"])
def test_an_index_without_a_scheme_is_reported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build would ask the public index instead, as pip ignores it."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv(f"PIP_{name.upper().replace('-', '_')}", "mirror.example.test:80/simple")
    said = f"pip's {name} is neither an address nor a folder: mirror.example.test:80/simple"
    with pytest.raises(WorkError, match=re.escape(said)):
        access.pip(Programs())
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # then it is not asked
    access.pip(Programs())
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv(f"PIP_{name.upper().replace('-', '_')}", str(tmp_path))
    access.pip(Programs())


@pytest.mark.processes
@pytest.mark.parametrize(("value", "is_off"), [("1", True), ("on", True), ("0", False)])
def test_pip_without_an_index_asks_none(
    value: str, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://one.test/a")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://two.test/a")
    monkeypatch.setenv("PIP_FIND_LINKS", "https://three.test/links")
    monkeypatch.setenv("PIP_NO_INDEX", value)
    found = access.pip(Programs())
    assert found.no_index is is_off
    for text in (found.remote(), " ".join(found.for_uv())):
        assert "three.test" in text
        assert ("one.test" in text, "two.test" in text) == (not is_off, not is_off)
        assert ("no-index" in text) == is_off


def test_uv_has_the_hosts_that_pip_trusts_its_certificates_and_its_proxy(tmp_path: Path) -> None:
    own = tmp_path / "own.pem"
    own.write_text("own")
    settings = access.Pip(trusted_hosts=("a.test", "b.test:8443"), cert=own, proxy="p.test:3128")
    words = " ".join(settings.for_uv())
    assert "--allow-insecure-host a.test --allow-insecure-host b.test:8443" in words
    given = access.uv_environment(settings)
    assert given["SSL_CERT_FILE"] == str(own)
    assert given["HTTPS_PROXY"] == given["http_proxy"] == "p.test:3128"
    assert set(access.uv_environment(access.Pip(cert=own))) == {"SSL_CERT_FILE"}


def test_local_wheels_are_found_by_their_sums_in_folders_and_local_indexes(tmp_path: Path) -> None:
    links, index = tmp_path / "links", tmp_path / "index"
    links.mkdir()
    (index / "simple" / "some-thing").mkdir(parents=True)
    (index / "files").mkdir()
    right = links / "torch-2.0+cpu-py3-none-any.whl"
    right.write_bytes(b"right")
    (links / "torch-3.0-py3-none-any.whl").write_bytes(b"another version")
    linked = index / "files" / "some_thing-1.0-py3-none-any.whl"
    linked.write_bytes(b"linked")
    page = index / "simple" / "some-thing" / "index.html"
    page.write_text(f'<a href="../../files/{linked.name}#sha256=0">{linked.name}</a>')
    settings = access.Pip(find_links=(str(links),), extra_indexes=((index / "simple").as_uri(),))
    wanted = {
        "torch": frozenset({hashlib.sha256(b"right").hexdigest()}),
        "some-thing": frozenset({hashlib.sha256(b"linked").hexdigest()}),
        "absent": frozenset({"0" * 64}),
    }
    assert list(access.local_wheels(settings, wanted)) == [
        (path, *wanted[name]) for path, name in ((linked, "some-thing"), (right, "torch"))
    ]


def test_the_ca_bundle_is_pips_own_first_then_the_variables(tmp_path: Path) -> None:
    own, variable = tmp_path / "own.pem", tmp_path / "variable.pem"
    own.write_text("own")
    variable.write_text("variable")
    environment = {"SSL_CERT_FILE": str(variable)}
    assert access.ca_bundle(access.Pip(cert=own), environment) == own
    assert access.ca_bundle(access.Pip(cert=tmp_path / "gone"), environment) == variable


def test_proxies_are_given_in_both_spellings() -> None:
    assert access.proxies({"HTTPS_PROXY": "http://p:1", "no_proxy": "x"}) == {
        "https_proxy": "http://p:1",
        "HTTPS_PROXY": "http://p:1",
        "no_proxy": "x",
        "NO_PROXY": "x",
    }


@pytest.mark.processes
def test_apt_lines_are_of_the_suite_and_its_updates_only() -> None:
    for line in access.apt_sources("bookworm", Programs()):
        assert line.startswith("deb ")
        assert line.split()[2] in ("bookworm", "bookworm-updates", "bookworm-security")
    assert access.apt_sources("nosuchsuite", Programs()) == []


def test_a_lock_does_not_depend_on_the_indexes_that_are_folders_here() -> None:
    configured = access.Pip(
        extra_indexes=("https://one.test/a", "file:///srv/simple"), find_links=("/srv/wheels",)
    )
    assert configured.without_local_indexes() == access.Pip(
        extra_indexes=("https://one.test/a",), find_links=("/srv/wheels",)
    )
