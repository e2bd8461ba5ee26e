"""Addresses of images in archives: of one or several images, by name, machine, and any age."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.image import address as source
from sqshforge.image.archive.image import open_image
from tests.support import archives
from tests.support.archives import KINDS, MORE, PLAIN, Image, file, layer, symlink


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_by_its_name(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "a:b"
    address = archives.write(Image([PLAIN]), kind, place)
    name = "test:latest" if kind == "docker-archive" else "latest"
    assert archives.output(address) == archives.output(f"{address}:{name}")
    with (
        pytest.raises(RequestError, match="no image 'other'") as caught,
        open_image(f"{address}:other"),
    ):
        pass
    assert name in caught.value.fix


@pytest.mark.parametrize("kind", KINDS)
def test_a_home_in_an_address_that_the_shell_leaves_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    archives.write(Image([PLAIN]), kind, tmp_path / "image")
    source.parse(f"{kind}:~/image", Programs()).config()
    (tmp_path / "root" / "etc").mkdir(parents=True)
    source.parse("rootfs:~/root", Programs()).config()


def test_docker_names_as_docker_takes_them(tmp_path: Path) -> None:
    address = archives.write(Image([PLAIN]), "docker-archive", tmp_path / "a.tar")
    for name in ("test", "test:latest", "docker.io/library/test"):
        archives.output(f"{address}:{name}")


def several(images: list[Image], place: Path) -> str:
    """Write an OCI layout of several images; returns its address."""
    files: dict[str, bytes] = {}
    listed = []
    for image in images:
        found = image.oci_files()
        listed += json.loads(found["index.json"])["manifests"]
        files |= found
    files["index.json"] = archives.dumped({"schemaVersion": 2, "manifests": listed})
    archives.put(files, place)
    return f"oci:{place}"


def test_one_of_several_images(tmp_path: Path) -> None:
    address = several([Image([PLAIN], tag="one"), Image([MORE], tag="two")], tmp_path / "oci")
    with pytest.raises(RequestError, match="2 images") as caught, open_image(address):
        pass
    assert ":one, :two" in caught.value.fix
    assert "bin/sh" in archives.parsed(archives.output(f"{address}:one"))
    assert "sqshforge" in archives.parsed(archives.output(f"{address}:two"))


def of(system: str, machine: str) -> Any:
    def change(index: Any) -> Any:
        index["manifests"][0]["platform"] = {"os": system, "architecture": machine}
        return index

    return change


def test_the_image_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [
        Image([layer(file(machine))], tag="", index=of(system, machine))
        for system, machine in [
            ("linux", "arm64"),
            ("windows", "amd64"),
            ("linux", "amd64"),
            ("unknown", "unknown"),
        ]
    ]
    address = several(images, tmp_path / "oci")
    for machine, name in [("x86_64", "amd64"), ("aarch64", "arm64")]:
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert list(archives.parsed(archives.output(address, files={}))) == [name]


def test_an_image_for_other_machines_only_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [
        Image([layer(file(machine))], tag="", index=of("linux", machine))
        for machine in ("amd64", "ppc64le")
    ]
    address = several(images, tmp_path / "oci")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RequestError, match="for linux/arm64") as caught, open_image(address):
        pass
    assert "linux/amd64, linux/ppc64le" in caught.value.fix


def test_an_index_in_an_index(tmp_path: Path) -> None:
    files = Image([PLAIN], index=of("linux", "amd64")).oci_files()
    for _ in range(3):
        inner = files["index.json"]
        digest = archives.sha256(inner)
        files[f"blobs/sha256/{digest[7:]}"] = inner
        media = "application/vnd.oci.image.index.v1+json"
        described = {"mediaType": media, "digest": digest, "size": len(inner)}
        files["index.json"] = archives.dumped({"manifests": [described]})
    archives.put(files, tmp_path / "oci")
    assert "bin/sh" in archives.parsed(archives.output(f"oci:{tmp_path}/oci"))


def test_docker_archives_of_all_ages(tmp_path: Path) -> None:
    image = Image([PLAIN, MORE, PLAIN])
    expected = archives.output(archives.write(image, "oci", tmp_path / "oci"))
    old = image.docker_members()
    same = old[5][0].name  # the third layer's tar is the first one's
    old[5] = symlink(same, f"../{old[1][0].name}")
    (tmp_path / "old").write_bytes(archives.tar(old))
    assert archives.output(f"docker-archive:{tmp_path}/old") == expected
    files = replace(image, packing="gzip").oci_files()
    names = [
        f"blobs/sha256/{archives.sha256(one)[7:]}"
        for one in map(archives.PACKINGS["gzip"], image.layers)
    ]
    config = f"blobs/{archives.sha256(image.config_bytes()).replace(':', '/')}"
    listed = [{"Config": config, "RepoTags": ["test:latest"], "Layers": names}]
    members = [file(name, data) for name, data in files.items()]
    members.append(file("manifest.json", archives.dumped(listed)))
    (tmp_path / "new").write_bytes(archives.tar(members))
    assert archives.output(f"docker-archive:{tmp_path}/new") == expected
    assert archives.output(f"oci-archive:{tmp_path}/new") == expected
