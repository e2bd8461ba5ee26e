"""Images in a real registry on the loopback, which `pack docker://` reads with skopeo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host import temporary
from sqshforge.host.programs import Programs
from sqshforge.host.suggest import sudo
from sqshforge.image import address as source
from tests.support.archives import Image, file, folder, layer, put, sha256, write
from tests.support.registries import push
from tests.support.registries import registry_fixture as registry_fixture

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
STACK = Image([layer(folder("d"), file("d/a", b"1"), file("b")), layer(file("d/.wh.a"))])


def pack(address: str, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sqshforge", "pack", address, "-o", output],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("form", ["oci", "v2s2"])
@pytest.mark.parametrize("packing", ["tar", "gzip"])
def test_an_image_of_a_registry_gives_the_bytes_of_its_archive(
    form: str, packing: str, registry: str, tmp_path: Path
) -> None:
    image = Image(STACK.layers, packing=packing)
    archive = write(image, "oci-archive", tmp_path / "image.tar")
    address = push(archive, f"{registry}/{form}/{packing}:1.0", "--format", form)
    done = pack(address, tmp_path / "pulled.sqsh")
    assert done.returncode == 0, done.stderr
    assert pack(archive, tmp_path / "archived.sqsh").returncode == 0
    assert (tmp_path / "pulled.sqsh").read_bytes() == (tmp_path / "archived.sqsh").read_bytes()
    record = json.loads((tmp_path / "pulled.sqsh.json").read_text())
    assert record["image"]["reference"] == address
    assert record["image"]["digest"] == sha256(image.config_bytes())
    assert "up to date" in pack(address, tmp_path / "pulled.sqsh").stdout
    pulled = Path(os.environ["SQSHFORGE_CACHE"]) / "pulled"
    assert list(pulled.iterdir()) == []


def test_a_name_for_several_machines_means_this_one(registry: str, tmp_path: Path) -> None:
    images = {
        architecture: Image(
            [layer(file("is", architecture.encode()))],
            config=lambda value, of=architecture: {**value, "architecture": of},
        )
        for architecture in ("arm64", "amd64", "ppc64le")
    }
    files, entries = dict[str, bytes](), []
    for architecture, image in images.items():
        files |= image.oci_files()
        described = json.loads(image.oci_files()["index.json"])["manifests"][0]
        described["platform"] = {"os": "linux", "architecture": architecture}
        entries.append({key: described[key] for key in described if key != "annotations"})
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    top = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": sha256(index),
        "size": len(index),
    }
    files[f"blobs/sha256/{sha256(index)[7:]}"] = index
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [top]}).encode()
    put(files, tmp_path / "layout")
    address = push(f"oci:{tmp_path}/layout", f"{registry}/several:1", "--all")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    found = source.parse(address, Programs()).config()
    assert found.digest == sha256(images[machine].config_bytes())


def test_a_digest_names_an_image_whatever_its_tag_is_by_now(registry: str, tmp_path: Path) -> None:
    old = write(STACK, "oci-archive", tmp_path / "old.tar")
    new = write(Image([layer(file("new"))]), "oci-archive", tmp_path / "new.tar")
    name = f"{registry}/moved:latest"
    push(old, name)
    said = Programs().capture(["skopeo", "inspect", f"docker://{name}"])
    digest = json.loads(said)["Digest"]
    image = source.parse(f"docker://{name}", Programs())
    first = image.config().digest
    push(new, name)
    by_digest = source.parse(f"docker://{registry}/moved@{digest}", Programs())
    assert by_digest.config().digest == first
    with pytest.raises(WorkError, match="pushed again"), image.open(first):
        pass
    with by_digest.open(first):
        pass


@pytest.mark.parametrize("name", ["absent:1", "moved:none", "UPPER:1"])
def test_a_name_without_an_image_is_a_wrong_request(
    name: str, registry: str, tmp_path: Path
) -> None:
    done = pack(f"docker://{registry}/{name}", tmp_path / "x.sqsh")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert name in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_registry_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        done = pack(f"docker://127.0.0.1:{port}/a:1", tmp_path / "x.sqsh")
    assert done.returncode == 1
    assert "connection refused" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_killed_packer_pulled_goes(registry: str, tmp_path: Path) -> None:
    address = push(
        write(STACK, "oci-archive", tmp_path / "image.tar"), f"{registry}/after/a/kill:1"
    )
    pulled = Path(os.environ["SQSHFORGE_CACHE"]) / "pulled"
    pulled.mkdir(parents=True, exist_ok=True)
    left = pulled / temporary.name("pack")
    image = source.parse(address, Programs())
    with temporary.folder("pack", above=pulled) as running:
        (left / "blobs").mkdir(parents=True)
        with image.open(image.config().digest):
            assert not left.exists()
            assert running.exists()


@pytest.mark.root
def test_a_disk_that_fills_up_in_a_pull(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it runs out of inodes: whether the bytes fit is checked before."""
    address = push(write(STACK, "oci-archive", tmp_path / "image.tar"), f"{registry}/full:1")
    small = tmp_path / "small"
    small.mkdir()
    Programs().capture(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=6", "tmpfs", small])
    monkeypatch.setenv("SQSHFORGE_CACHE", str(small))
    try:
        done = pack(address, tmp_path / "a.sqsh")
        left = list((small / "pulled").iterdir())
    finally:
        Programs().capture(["umount", small])
    assert done.returncode == 3, done.stderr
    name = address.removeprefix("docker://")
    assert f"error: No space left on device while pulling {name}: it may take up to" in done.stderr
    assert f"where: {small}/pulled\n" in done.stderr and "fix:   free " in done.stderr
    assert left == [] and not (tmp_path / "a.sqsh").exists()


def test_without_skopeo_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError) as caught:
        source.parse("docker://127.0.0.1:1/a", Programs()).config()
    assert caught.value.fix == f"{sudo()}apt-get install skopeo"


class Closed(Programs):
    """A registry that asks for a login."""

    def which(self, program: str) -> Path:
        script = 'echo \'time="t" level=fatal msg="reading manifest: unauthorized: \\"no\\""\' >&2'
        path = Path(os.environ["CLOSED"])
        path.write_text(f"#!/bin/sh\n{script}\nexit 1\n")
        path.chmod(0o755)
        return path


def test_a_login_that_is_missing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOSED", str(tmp_path / "skopeo"))
    # Docker's registry, which refuses nonexistent names, is the default if none is named.
    for name, host in {
        "me/a:1": "docker.io",
        "a:1": "docker.io",
        "host.test/a:1": "host.test",
    }.items():
        with pytest.raises(RequestError) as caught:
            source.parse(f"docker://{name}", Closed()).config()
        assert caught.value.fix == f"check the spelling, and skopeo login {host}"
    assert caught.value.where == 'reading manifest: unauthorized: "no"'
