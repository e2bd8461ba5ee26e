"""Invalid configs, manifests and indexes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sqshforge.tar import limits
from tests.support import archives
from tests.support.archives import Image, file, layer, refused

ONE = layer(file("a", b"content" * 1000))


def changed(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        change(value)
        return value

    return apply


DEEP = b"[" * 100_000
CONFIGS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "the config is no JSON"),
    "no UTF-8": (b'{"a": "\xff"}', "the config is no JSON"),
    "half a character": (b'{"a": "\\ud800", "rootfs": {}}', "the config is no JSON"),
    "a number without end": (b'{"a": ' + b"9" * 100_000 + b"}", "the config is no JSON"),
    "empty": (b" ", "the config is no JSON"),
    "a list": (b"[]", "the config is no object"),
    "null": (b"null", "the config is no object"),
    "nested deep": (b'{"a":' + DEEP, "nested too deep"),
    "nested deep in objects": (b'{"a":' * 100_000, "nested too deep"),
    "large": (b" " * (limits.JSON + 1), "the most"),
    "no layers at all": (b"{}", "not a container image"),
    "rootfs as a list": (b'{"rootfs": [1]}', "is no object"),
    "layers as text": (b'{"rootfs": {"diff_ids": "sha256"}}', "wrong type"),
    "layers as numbers": (b'{"rootfs": {"diff_ids": [1]}}', "wrong type"),
    "a layer as a path": (b'{"rootfs": {"diff_ids": ["sha256:../../etc/passwd"]}}', "not a digest"),
    "a layer in MD5": (b'{"rootfs": {"diff_ids": ["md5:00"]}}', "not a digest"),
    "a config as a list": (changed(lambda config: config.update(config=[1])), "is no object"),
    "a time as a number": (
        changed(lambda config: config.update(created=7)),
        "no text as 'created'",
    ),
    "a history of texts": (changed(lambda config: config.update(history=["a"])), "is no object"),
    "a history as an object": (
        changed(lambda config: config.update(history={"a": 1})),
        "wrong type",
    ),
    "fewer layers": (
        changed(lambda config: config["rootfs"]["diff_ids"].clear()),
        "has 1 layers, its config 0",
    ),
    "more layers": (
        changed(lambda config: config["rootfs"]["diff_ids"].append(archives.sha256(b""))),
        "has 1 layers, its config 2",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["oci", "docker-archive"])
def test_configs(name: str, kind: str, tmp_path: Path) -> None:
    config, expected = CONFIGS[name]
    refused(archives.write(Image([ONE], config=config), kind, tmp_path / "image"), expected)


def layers(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    return changed(lambda manifest: change(manifest["layers"][0]))


def described(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    return changed(lambda index: change(index["manifests"][0]))


MANIFESTS: dict[str, tuple[Any, str]] = {
    "a list": (lambda manifest: [], "is no object"),
    "no JSON": (lambda manifest: b"{", "is no JSON"),
    "nested deep": (lambda manifest: DEEP, "nested too deep"),
    "100,000 layers": (
        changed(lambda manifest: manifest.update(layers=manifest["layers"] * 100_000)),
        "are the most",
    ),
    "1,000 layers": (
        changed(lambda manifest: manifest.update(layers=manifest["layers"] * 1000)),
        "are the most",
    ),
    "layers as an object": (
        changed(lambda manifest: manifest.update(layers={"a": 1})),
        "wrong type",
    ),
    "a layer as a number": (changed(lambda manifest: manifest.update(layers=[7])), "is no object"),
    "no config": (changed(lambda manifest: manifest.pop("config")), "no text as 'digest'"),
    "an artifact": (
        changed(lambda manifest: manifest["config"].update(mediaType="application/vnd.helm")),
        "not a container image",
    ),
    "an encrypted layer": (
        layers(lambda one: one.update(mediaType=one["mediaType"] + "+encrypted")),
        "is 'application",
    ),
    "a layer as a path": (
        layers(lambda one: one.update(digest="sha256:../../etc/passwd")),
        "not a valid digest",
    ),
    "a layer in MD5": (
        layers(lambda one: one.update(digest="md5:" + "0" * 32)),
        "not a valid digest",
    ),
    "a digest in capitals": (
        layers(lambda one: one.update(digest=one["digest"].upper())),
        "not a valid digest",
    ),
    "a digest and a newline": (
        layers(lambda one: one.update(digest=one["digest"] + "\n")),
        "not a valid digest",
    ),
    "a digest as a number": (layers(lambda one: one.update(digest=7)), "no text as 'digest'"),
    "a layer that is not there": (
        layers(lambda one: one.update(digest="sha256:" + "0" * 64)),
        "is missing",
    ),
    "a layer that is elsewhere": (
        layers(lambda one: one.update(digest="sha256:" + "0" * 64, urls=["http://x/y"])),
        "only its URL",
    ),
    "a size that is wrong": (layers(lambda one: one.update(size=1)), "1 were announced"),
    "a size as text": (layers(lambda one: one.update(size="1")), "no size"),
    "a negative size": (layers(lambda one: one.update(size=-1)), "no size"),
    "a size of true": (layers(lambda one: one.update(size=True)), "no size"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name: str, tmp_path: Path) -> None:
    manifest, expected = MANIFESTS[name]
    for kind in ("oci", "oci-archive"):
        image = Image([ONE], manifest=manifest)
        refused(archives.write(image, kind, tmp_path / kind), expected)


INDEXES: dict[str, tuple[Any, str]] = {
    "a list": (lambda index: [], "is no object"),
    "no JSON": (lambda index: b"\0", "is no JSON"),
    "large": (lambda index: b" " * (limits.JSON + 1), "the most"),
    "nested deep": (lambda index: DEEP, "nested too deep"),
    "nothing": (changed(lambda index: index.clear()), "lists no image"),
    "no images": (changed(lambda index: index.update(manifests=[])), "lists no image"),
    "null": (changed(lambda index: index.update(manifests=None)), "lists no image"),
    "a number": (changed(lambda index: index.update(manifests=[7])), "is no object"),
    "an unknown kind": (
        described(lambda one: one.update(mediaType="text/html")),
        "neither an image manifest nor",
    ),
    "an old kind": (
        described(
            lambda one: one.update(mediaType="application/vnd.docker.distribution.manifest.v1+json")
        ),
        "neither an image manifest nor",
    ),
    "a platform as text": (described(lambda one: one.update(platform="linux")), "is no object"),
    "notes as numbers": (
        described(lambda one: one.update(annotations={"org.opencontainers.image.ref.name": 7})),
        "no text as",
    ),
    "attestations alone": (
        described(lambda one: one.update(platform={"os": "unknown", "architecture": "unknown"})),
        "lists no image",
    ),
    "an image as a path": (
        described(lambda one: one.update(digest="../../etc/passwd")),
        "not a valid digest",
    ),
    "a layer as an index": (
        described(lambda one: one.update(digest=archives.sha256(ONE), size=len(ONE))),
        "no JSON",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name: str, tmp_path: Path) -> None:
    index, expected = INDEXES[name]
    for kind in ("oci", "oci-archive"):
        image = Image([ONE], index=index)
        tag = ":latest" if name in ("notes as numbers",) else ""
        refused(archives.write(image, kind, tmp_path / kind) + tag, expected)


def test_an_index_that_says_that_it_is_in_itself(tmp_path: Path) -> None:
    files = Image([ONE]).oci_files()
    digest = f"sha256:{'0' * 64}"
    one = {"mediaType": f"{archives.OCI}index.v1+json", "digest": digest, "size": 0}
    for _ in range(3):
        one["size"] = len(archives.dumped({"manifests": [one]}))
    files["index.json"] = files[f"blobs/sha256/{digest[7:]}"] = archives.dumped(
        {"manifests": [one]}
    )
    archives.put(files, tmp_path / "oci")
    refused(f"oci:{tmp_path}/oci", "does not match its digest")


def test_indexes_in_indexes_without_end(tmp_path: Path) -> None:
    files = Image([ONE]).oci_files()
    for _ in range(limits.NESTING + 1):
        inner = files["index.json"]
        digest = archives.sha256(inner)
        files[f"blobs/sha256/{digest[7:]}"] = inner
        one = {
            "mediaType": f"{archives.OCI}index.v1+json",
            "digest": digest,
            "size": len(inner),
        }
        files["index.json"] = archives.dumped({"manifests": [one]})
    archives.put(files, tmp_path / "oci")
    refused(f"oci:{tmp_path}/oci", "indexes within each other")


SAVED: dict[str, tuple[Any, str]] = {
    "an object": (lambda listed: {}, "not a list of images"),
    "no image": (lambda listed: [], "not a list of images"),
    "a number": (lambda listed: [7], "is no object"),
    "no JSON": (lambda listed: b"\0", "is no JSON"),
    "large": (lambda listed: b" " * (limits.JSON + 1), "the most"),
    "nested deep": (lambda listed: DEEP, "nested too deep"),
    "no config": (changed(lambda listed: listed[0].pop("Config")), "no text as 'Config'"),
    "a config that leads up": (
        changed(lambda listed: listed[0].update(Config="../../etc/passwd")),
        "leads out",
    ),
    "a config that is not there": (
        changed(lambda listed: listed[0].update(Config="/etc/passwd")),
        "is missing",
    ),
    "layers as text": (changed(lambda listed: listed[0].update(Layers="a")), "wrong type"),
    "a layer as a number": (changed(lambda listed: listed[0].update(Layers=[7])), "wrong type"),
    "a layer that leads up": (
        changed(lambda listed: listed[0].update(Layers=["../../x"])),
        "leads out",
    ),
    "a layer that is a folder": (
        changed(lambda listed: listed[0].update(Layers=["0" * 64])),
        "is missing",
    ),
    "a layer without a name": (changed(lambda listed: listed[0].update(Layers=[""])), "is missing"),
    "100,000 layers": (
        changed(lambda listed: listed[0].update(Layers=["x"] * 100_000)),
        "are the most",
    ),
    "names as numbers": (changed(lambda listed: listed[0].update(RepoTags=[7])), "wrong type"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SAVED)
def test_manifests_of_docker(name: str, tmp_path: Path) -> None:
    manifest, expected = SAVED[name]
    image = Image([ONE], manifest=manifest)
    refused(archives.write(image, "docker-archive", tmp_path / "a"), expected)


def test_a_digest_in_sha512(tmp_path: Path) -> None:
    files = Image([ONE]).oci_files()
    index = json.loads(files["index.json"])
    name = f"blobs/{index['manifests'][0]['digest'].replace(':', '/')}"
    long = hashlib.sha512(files[name]).hexdigest()
    files[f"blobs/sha512/{long}"] = files.pop(name)
    index["manifests"][0]["digest"] = f"sha512:{long}"
    files["index.json"] = archives.dumped(index)
    archives.put(files, tmp_path / "oci")
    assert "a" in archives.parsed(archives.output(f"oci:{tmp_path}/oci"))
