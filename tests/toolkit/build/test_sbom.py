"""The bill of materials of an image: a valid SPDX document, complete and correct."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from spdx_tools.spdx.model import Document, Package
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from sqshforge.host.programs import Programs, Result
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

A, B, C, COMMIT = "a" * 64, "b" * 64, "c" * 64, "0123456789" * 4
GIT = "https://github.com/triton-lang/triton"
LOCK = f"""
{{"target": "test", "inputs": "sha256:{A}", "unlocked": ["nccl: no commit", "base: no digest"],
 "base": {{"image": "nvidia/cuda:12.1.1-runtime", "digest": null}},
 "compiler": {{"image": "mirror.example.com:5000/cuda:12.1.1-devel", "digest": "sha256:{B}"}},
 "apt": {{"suite": "bookworm", "packages": [["bash", "5"]]}},
 "python": {{
  "installer": {{"name": "pip", "version": "25.3", "hashes": ["sha256:{A}"]}},
  "packages": [
   {{"name": "torch", "version": "2.1", "hashes": ["sha256:{A}", "sha256:{B}"]}},
   {{"name": "debian-own", "version": "1", "hashes": ["sha256:{A}"]}}],
  "bound": [{{"name": "index", "url": "https://index.example.com", "packages": [
   {{"name": "numpy", "version": "2.3.4", "hashes": ["sha256:{A}"]}}]}}],
  "builders": [{{"name": "ninja", "version": "1.13", "hashes": []}}],
  "built": [{{"name": "mamba-ssm", "version": "2.2", "hashes": ["sha256:{C}"]}}]}},
 "sources": [
  {{"name": "triton", "git": "{GIT}", "ref": "release/2.2.x", "commit": "{COMMIT}"}},
  {{"name": "nccl", "git": "https://github.com/NVIDIA/nccl", "ref": "v2", "commit": null}}],
 "archives": [
  {{"name": "efa", "url": "https://efa.example.com/efa.tar.gz", "sha256": "{C}"}},
  {{"name": "local", "url": "http://127.0.0.1:8000/local.tar.gz", "sha256": null}}],
 "patches": [
  {{"file": "triton/cache.patch", "sha256": "{B}", "of": "triton"}},
  {{"file": "bash.patch", "sha256": "{B}", "of": "bash"}}]}}
"""
STATUS = """\
Package: bash
Status: install ok installed
Maintainer: Matthias (the shell) Klose <doko@example.org>
Architecture: amd64
Source: bash-source (5.2)
Version: 1:5.2.15-2+b7
Description: a shell
 Version: 0 is not this line

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: half
Status: install ok half-installed
Version: 1

Package: unversioned
Status: install ok installed
"""


def dist(root: Path, name: str, version: str, more: str | bytes = "", place: str = "") -> None:
    folder = root / (place or "usr/local/lib/python3.11/site-packages")
    info = folder / f"{re.sub('[^a-z]', '_', name)}-{version}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    tail = more if isinstance(more, bytes) else more.encode()
    (info / "METADATA").write_bytes(head + tail + b"\n\nLicense: not this one\n")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A small root with a lock in its /meta."""
    for name in ("meta", "etc", "var/lib/dpkg/status.d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "meta/lock.json").write_text(LOCK)
    (tmp_path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian"\n')
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    dist(tmp_path, "NumPy", "2.3.4", "License-Expression: BSD-3-Clause AND mit")
    dist(tmp_path, "torch", "2.1", "License: BSD-3")
    dist(tmp_path, "triton", "2.2.0", "Classifier: License :: OSI Approved :: MIT License")
    dist(tmp_path, "mamba_ssm", "2.2")
    dist(tmp_path, "debian-own", "1", place="usr/lib/python3/dist-packages")
    return tmp_path


def sbom(meta: Path, *words: str | Path, epoch: str = "1700000000") -> Result:
    argv = [sys.executable, "-B", ROOT / "images" / "inside" / "sbom.py", "--meta", meta, *words]
    return Programs().attempt(argv, env={"SOURCE_DATE_EPOCH": epoch})


def made(image: Path) -> Document:
    """Make the document of a root, which must be valid."""
    done = sbom(image / "meta", "--root", image)
    assert (done.code, done.out, done.err) == (0, "", "")
    return checked(image / "meta")


def checked(meta: Path) -> Document:
    document = parse_file(str(meta / "sbom.spdx.json"))
    assert validate_full_spdx_document(document) == []
    return document


def packages(document: Document, kind: str) -> dict[str, Package]:
    return {one.name: one for one in document.packages if one.spdx_id.split("-")[1] == kind}


def locator(package: Package) -> str:
    return package.external_references[0].locator


def sums(package: Package) -> list[str]:
    return [one.value for one in package.checksums]


def links(document: Document) -> set[tuple[str, str, str]]:
    """Return the relationships, with names in place of identifiers."""
    names = {one.spdx_id: one.name for one in document.packages} | {"SPDXRef-DOCUMENT": "document"}
    return {
        (names[one.spdx_element_id], one.relationship_type.name, names[target])
        for one in document.relationships
        if isinstance(target := one.related_spdx_element_id, str)
    }


def test_the_image_holds_what_its_own_records_say(image: Path) -> None:
    document = made(image)
    debs, dists = packages(document, "deb"), packages(document, "python")
    assert set(debs) == {"bash"}
    bash = debs["bash"]
    assert locator(bash) == "pkg:deb/debian/bash@1:5.2.15-2%2Bb7?arch=amd64&distro=debian-12"
    assert bash.source_info == "built from the source package bash-source 5.2"
    assert "doko@example.org" in str(bash.supplier)
    assert set(dists) == {"NumPy", "torch", "triton", "mamba_ssm", "debian-own"}
    assert locator(dists["mamba_ssm"]) == "pkg:pypi/mamba-ssm@2.2"
    assert "site-packages/torch-2.1.dist-info/METADATA" in str(dists["torch"].source_info)
    # torch has two files in the lock, and Debian's own package has none.
    assert {name: sums(one) for name, one in dists.items() if one.checksums} == {"NumPy": [A]}
    inside = {one for name, how, one in links(document) if (name, how) == ("test", "CONTAINS")}
    assert inside == {"debian", *debs, *dists}
    assert ("document", "DESCRIBES", "test") in links(document)


def test_the_lock_tells_what_it_was_made_from(image: Path) -> None:
    document = made(image)
    places = {one.name: str(one.download_location) for one in document.packages}
    assert places["nccl"] == places["local"] == "NOASSERTION"
    assert places["efa"] == "https://efa.example.com/efa.tar.gz"
    assert packages(document, "source")["triton"].download_location == f"git+{GIT}@{COMMIT}"
    assert sums(packages(document, "archive")["efa"]) == [C]
    assert sums(packages(document, "sdist")["mamba-ssm"]) == [C]
    assert sums(packages(document, "patch")["bash.patch"]) == [B]
    [base] = packages(document, "base").values()
    [compiler] = packages(document, "compiler").values()
    assert locator(base) == "pkg:docker/nvidia/cuda@12.1.1-runtime"
    mirror = "repository_url=mirror.example.com:5000"
    assert locator(compiler) == f"pkg:docker/cuda@sha256:{B}?{mirror}"
    comment = document.creation_info.document_comment
    assert comment == "Not locked: nccl: no commit; base: no digest"
    assert links(document) >= {
        ("test", "DESCENDANT_OF", base.name),
        (compiler.name, "BUILD_TOOL_OF", "test"),
        ("pip", "BUILD_TOOL_OF", "test"),
        ("ninja", "BUILD_DEPENDENCY_OF", "test"),
        ("mamba_ssm", "GENERATED_FROM", "mamba-ssm"),
        ("triton", "GENERATED_FROM", "triton"),
        ("test", "GENERATED_FROM", "nccl"),
        ("test", "GENERATED_FROM", "efa"),
        ("bash.patch", "PATCH_FOR", "bash"),
        ("bash.patch", "PATCH_APPLIED", "bash"),
    }
    cache = packages(document, "patch")["triton/cache.patch"].spdx_id
    assert {
        (one.relationship_type.name, str(one.related_spdx_element_id).split("-")[1])
        for one in document.relationships
        if one.spdx_element_id == cache
    } == {("PATCH_FOR", "source"), ("PATCH_APPLIED", "python")}


def test_only_an_spdx_expression_is_a_declared_license(image: Path) -> None:
    apache = "Apache-2.0 WITH LLVM-exception"
    said = {
        "two": (f"License-Expression: (MIT or {apache}) AND isc", f"(MIT OR {apache}) AND ISC"),
        "words": ("License: Apache License, Version 2.0", "Apache-2.0"),
        "vague": ("License: BSD\nClassifier: License :: OSI Approved :: BSD License", None),
        "text": ("License: Copyright (c) 2020\n        Permission is AND granted", None),
        "unknown": ("License-Expression: LicenseRef-own OR MIT", None),
        "broken": ("License-Expression: MIT OR (WITH", None),
        "misplaced": ("License-Expression: LLVM-exception", None),
        "several": (
            "Classifier: License :: OSI Approved :: MIT License\n"
            "Classifier: License :: OSI Approved :: ISC License (ISCL)",
            None,
        ),
    }
    for name, (more, _) in said.items():
        dist(image, name, "1", more)
    dists = packages(made(image), "python")
    assert {name: str(dists[name].license_declared) for name in said} == {
        name: expected or "NOASSERTION" for name, (_, expected) in said.items()
    }
    assert dists["vague"].license_comment == "metadata says: BSD"


def test_odd_records_stay_valid(image: Path) -> None:
    site = image / "usr/local/lib/python3.11/site-packages"
    dist(image, "torch", "2.0")
    dist(image, "odd näme\x07/@?#", "1 + 2", b"License: \xff\xfe\x00")
    (site / "empty-1.dist-info").mkdir()
    (site / "old.egg-info").write_bytes(b"Name: old\r\nVersion: 3\r\n")
    (site / "loop-packages").symlink_to("loop-packages")
    (image / "usr/local/lib64").symlink_to("lib")
    (image / "usr/lib/python3.9").mkdir()
    (image / "usr/lib/python3.9/site-packages").symlink_to(Path(pytest.__file__).parent.parent)
    odd = "Package: gcc++ ü\nVersion: 1~é\x1b[0m\nMaintainer: <only@mail>\n".encode() + b"A: \xff\n"
    (image / "var/lib/dpkg/status.d/odd").write_bytes(odd)
    (image / "var/lib/dpkg/status.d/odd.md5sums").write_text("Package: none\nVersion: 1\n")
    document = made(image)
    assert set(packages(document, "deb")) == {"bash", "gcc++ ü"}
    names = [one.name for one in document.packages if "SPDXRef-python" in one.spdx_id]
    usual = ["NumPy", "debian-own", "mamba_ssm", "torch", "triton"]
    assert sorted(names) == sorted([*usual, "torch", "old", "odd näme\ufffd/@?#"])


def test_without_records_the_lock_is_reported(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/lock.json").write_text('{"target": "bare", "python": null}')
    assert [one.name for one in made(tmp_path).packages] == ["bare"]


def test_the_same_input_and_epoch_give_the_same_bytes(image: Path) -> None:
    path = image / "meta/sbom.spdx.json"
    made(image)
    first = path.read_bytes()
    assert b'"created": "2023-11-14T22:13:20Z"' in first
    assert str(image).encode() not in first
    made(image)
    assert path.read_bytes() == first
    assert sorted(one.name for one in path.parent.iterdir()) == ["lock.json", path.name]
    namespace = checked(path.parent).creation_info.document_namespace
    assert namespace.startswith("https://sqshforge.io/spdx/test-")
    dist(image, "new", "1")
    assert made(image).creation_info.document_namespace != namespace


def test_this_machine_has_a_valid_one(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text((ROOT / "recipes/locks/cpu-mamba.lock").read_text())
    done = sbom(tmp_path, epoch="")
    assert (done.code, done.err) == (0, "")
    document = checked(tmp_path)
    assert {"bash", "libc6"} <= set(packages(document, "deb"))
    assert {"spdx-tools", "pytest"} <= set(packages(document, "python"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{", "not valid JSON"),
        ("\xff\xfe", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not an object with a target"),
        ('{"target": "t", "sources": [1]}', "sources is not a list of objects"),
        ('{"target": "t", "archives": [{}]}', "a part has no name"),
        ('{"target": "t", "base": {"image": ["x"]}}', "image is not a string"),
    ],
)
def test_a_broken_lock_is_reported_in_one_line(image: Path, text: str, shown: str) -> None:
    lock = image / "meta/lock.json"
    lock.write_text(text, encoding="latin-1")
    done = sbom(image / "meta", "--root", image)
    assert done.code == 1
    assert re.fullmatch(rf"sbom\.py: {re.escape(str(lock))}: .*{shown}.*\n", done.err)
    assert not (image / "meta/sbom.spdx.json").exists()


@pytest.mark.parametrize(
    ("words", "epoch", "code"),
    [
        (("--root", "/nowhere"), "", 1),
        (("--root", __file__), "", 1),
        (("--rot", "/"), "", 2),
        ((), "yesterday", 2),
        ((), "9" * 30, 2),
        (("--meta", "/nowhere"), "", 1),
    ],
)
def test_a_wrong_request_is_reported_in_one_line(
    image: Path, words: tuple[str, ...], epoch: str, code: int
) -> None:
    done = sbom(image / "meta", *words, epoch=epoch)
    assert done.code == code
    assert re.fullmatch(r"sbom\.py: .+\n", done.err)


@pytest.mark.parametrize(
    ("words", "declared", "comment"),
    [
        ("MIT", "MIT", None),
        (
            "BSD-3-Clause AND Apache-2.0 WITH LLVM-exception",
            "BSD-3-Clause AND Apache-2.0 WITH LLVM-exception",
            None,
        ),
        ("its own", "NOASSERTION", "metadata says: its own"),
        (None, "NOASSERTION", None),
    ],
)
def test_a_sources_license_and_where_its_text_is(
    image: Path, words: str | None, declared: str, comment: str | None
) -> None:
    lock = json.loads(LOCK)
    lock["sources"][0]["license"] = words
    (image / "meta/lock.json").write_text(json.dumps(lock))
    (image / "usr/share/doc/triton").mkdir(parents=True)
    (image / "usr/share/doc/triton/LICENSE").touch()
    assert sbom(image / "meta", "--root", image).code == 0
    found = json.loads((image / "meta/sbom.spdx.json").read_text())["packages"]
    sources = {one["name"]: one for one in found if one["SPDXID"].startswith("SPDXRef-source")}
    assert sources["triton"]["licenseDeclared"] == declared
    assert sources["triton"].get("licenseComments") == comment
    assert sources["triton"]["sourceInfo"].endswith("/usr/share/doc/triton/LICENSE")
    assert "license" not in sources["nccl"]["sourceInfo"]
