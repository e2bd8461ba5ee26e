"""The keys that a bootstrap trusts: the file that apt reads contains the keys in its table."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from sqshforge import recipe
from sqshforge.build.base_image import TRUSTED, _trusted, deb_lines
from sqshforge.host.programs import Programs

PUBLIC_KEY = 6  # the packet type (RFC 9580, section 5)


def test_each_bootstrap_of_a_recipe_has_its_keys_in_the_project(root: Path) -> None:
    for name in recipe.targets(root / "recipes"):
        bootstrap = recipe.find(name, root / "recipes").base.bootstrap
        if bootstrap is not None:
            assert (root / "recipes/keys" / f"{bootstrap.suite}.asc").is_file()


def test_the_keys_are_those_of_the_table(root: Path) -> None:
    table = (root / "recipes/keys/README.md").read_text()
    rows = re.findall(r"^\| (\w+\.asc) \| .* \| ([0-9A-F ]{49,}) \|$", table, re.MULTILINE)
    listed = {(file, fingerprint.replace(" ", "")) for file, fingerprint in rows}
    found = {
        (path.name, fingerprint)
        for path in (root / "recipes/keys").glob("*.asc")
        for fingerprint in fingerprints(path.read_text())
    }
    assert found == listed


def test_apt_is_given_the_machine_s_keys_and_the_pinned_ones(root: Path, tmp_path: Path) -> None:
    folder = _trusted(root / "recipes/keys/bookworm.asc", tmp_path / "keys")
    assert folder.stat().st_mode & 0o055 == 0o055
    names = {path.name for path in folder.iterdir()}
    assert names == {"bookworm.asc", *(path.name for path in TRUSTED.iterdir())}


def test_apt_s_own_user_can_read_the_keys_under_a_strict_umask(root: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = _trusted(root / "recipes/keys/bookworm.asc", tmp_path / "keys")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_an_archive_has_the_parts_and_the_suites_that_the_recipe_names(root: Path) -> None:
    bootstrap = recipe.find("neuron29-mamba2", root / "recipes").base.bootstrap
    assert deb_lines(bootstrap, Programs()) == [
        f"deb http://archive.ubuntu.com/ubuntu {suite} main universe"
        for suite in ("noble", "noble-updates", "noble-security")
    ]
    assert bootstrap is not None
    plain = bootstrap.model_copy(update={"components": ("main",), "pockets": ()})
    assert deb_lines(plain, Programs()) == ["deb http://archive.ubuntu.com/ubuntu noble main"]
    moment = {"mirror": "http://x/{snapshot}/", "snapshot": "20250101T000000Z"}
    assert deb_lines(plain.model_copy(update=moment), Programs()) == [
        "deb [check-valid-until=no] http://x/20250101T000000Z/ noble main"
    ]


def fingerprints(armored: str) -> Iterator[str]:
    """Yield the fingerprints of the public keys in an armored file (RFC 9580, section 5.5.4)."""
    body = armored.partition("\n\n")[2].partition("\n=")[0]
    data = base64.b64decode(body)
    at = 0
    while at < len(data):
        tag, length, at = _header(data, at)
        if tag == PUBLIC_KEY:
            packet = data[at : at + length]
            assert packet[0] == 4  # the version of the key
            whole = b"\x99" + len(packet).to_bytes(2, "big") + packet
            yield hashlib.sha1(whole).hexdigest().upper()
        at += length


def _header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return a packet's tag, its length, and the start of its body (RFC 9580, section 4.2)."""
    first = data[at]
    if first & 0x40:  # the new format
        if data[at + 1] < 192:
            return first & 0x3F, data[at + 1], at + 2
        if data[at + 1] < 224:
            return first & 0x3F, ((data[at + 1] - 192) << 8) + data[at + 2] + 192, at + 3
        return first & 0x3F, int.from_bytes(data[at + 2 : at + 6], "big"), at + 6
    size = 1 << (first & 3)
    return (first >> 2) & 0xF, int.from_bytes(data[at + 1 : at + 1 + size], "big"), at + 1 + size
