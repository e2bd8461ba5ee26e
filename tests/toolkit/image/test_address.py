"""The sources of images: addresses, and that reading leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.hot import NONE
from sqshforge.image import address as source
from sqshforge.image import overlay
from tests.conftest import ROOT
from tests.support import docker_api, engines, odd_root
from tests.support.containers import until
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the smallest image can be built from."""
    folder = tmp_path_factory.mktemp("context")
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    tree = folder / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/issue").write_text("tiny")
    (tree / "more").write_bytes(bytes(1 << 20))  # more than a pipe holds
    odd_root.tar(tree, folder / "rootfs.tar")
    return folder


@pytest.fixture(scope="module")
def in_buildah(context: Path) -> Iterator[str]:
    with odd_root.in_buildah(context) as name:
        yield f"buildah://{name}"


@pytest.fixture
def in_docker(context: Path, docker: str) -> str:
    return f"dockerd://{odd_root.in_docker(context, docker)}"


@pytest.fixture
def image(request: pytest.FixtureRequest) -> source.Source:
    """The smallest image, in the engine that the test runs for."""
    if request.param == "unmounted":
        address = request.getfixturevalue("in_docker")
        return engines.Unmounted(address.removeprefix("dockerd://"), Programs())
    return source.parse(request.getfixturevalue(request.param), Programs())


IN_DOCKER = [pytest.param(name, marks=pytest.mark.root) for name in ("in_docker", "unmounted")]
each = pytest.mark.parametrize("image", ["in_buildah", *IN_DOCKER], indirect=True)


def containers(image: source.Source) -> list[str]:
    """Return the working containers of an image."""
    programs, name = Programs(), image.config().reference
    if name.startswith("buildah://"):
        listed = json.loads(programs.capture(["buildah", "containers", "--json"]))
        return [one["id"] for one in listed or () if f"buildah://{one['imagename']}" == name]
    argv: list[str | Path] = [engines.CLIENT, "ps", "--all", "--quiet"]
    return programs.capture(argv).split()


@pytest.mark.processes
@each
def test_an_image_says_what_it_is(image: source.Source) -> None:
    config = image.config()
    assert config.digest is not None and config.digest.startswith("sha256:")
    assert len(config.digest) == 71
    assert config.created > odd_root.TIME
    assert config.volumes == config.entrypoint == config.cmd == ()


@pytest.mark.processes
@pytest.mark.root
def test_a_working_container_is_gone_after_use(in_buildah: str) -> None:
    image = source.parse(in_buildah, Programs())
    assert containers(image) == []
    with image.open():
        assert len(containers(image)) == 1
    assert containers(image) == []


@pytest.mark.processes
@pytest.mark.root
@each
def test_what_is_opened_is_the_image(image: source.Source, tmp_path: Path) -> None:
    with image.open() as content:
        assert issue(content, tmp_path) == "tiny"
    assert containers(image) == []


def issue(content: source.Content, folder: Path) -> str:
    """Return the content of an image's file; `folder` is for what has to be fetched."""
    if isinstance(content, source.Folder):
        return (content.stack[0] / "etc/issue").read_text()
    out = io.BytesIO()
    assert isinstance(content, source.Remote)
    with content.fetched(folder) as stream:
        stream.write_base(
            out, {}, 0, lambda amount: None, split=True, xattrs=False, devices=False, hot=NONE
        )
    assert list(folder.iterdir()) == []
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        file = tar.extractfile("etc/issue")
        assert file is not None
        return file.read().decode()


@pytest.mark.processes
@pytest.mark.root
@each
def test_the_layers_are_seen(image: source.Source, tmp_path: Path) -> None:
    with image.open() as content:
        if isinstance(content, source.Remote):
            with content.fetched(tmp_path) as stream:  # and no more than needed
                assert stream.top_names(0) == {b"etc"}
        else:
            assert content.top_names(0) == {b"etc", b"more"}
    assert len(image.config().layers) == 1


@pytest.mark.processes
@pytest.mark.root
@each
def test_what_was_opened_is_gone_after_a_failure_too(image: source.Source) -> None:
    with pytest.raises(KeyError), image.open():
        raise KeyError
    assert containers(image) == []


class Full(io.RawIOBase):
    def write(self, data: object) -> int:
        raise BrokenPipeError


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_reader_may_leave_before_the_end(in_carrying: source.Source) -> None:
    """The daemon then waits in the middle of the copy, and locks its container."""
    with in_carrying.open() as content, pytest.raises(BrokenPipeError):
        assert isinstance(content, source.Remote)
        content.write_payload(cast(IO[bytes], Full()))
    assert containers(in_carrying) == []


@pytest.fixture
def in_carrying(docker: str, tmp_path: Path) -> source.Source:
    """An image with a /sqshforge too large for any pipe or socket buffer."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY large /sqshforge/\n")
    (tmp_path / "large").write_bytes(bytes(16 << 20))
    return engines.Unmounted(odd_root.in_docker(tmp_path, docker), Programs())


@pytest.mark.processes
def test_an_image_that_is_to_be_saved_takes_room(
    in_docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = engines.Unmounted(in_docker.removeprefix("dockerd://"), Programs())
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with image.open() as content, pytest.raises(MissingError, match="saving") as caught:
        assert isinstance(content, source.Remote)
        with content.fetched(tmp_path):
            pass
    assert str(tmp_path) in caught.value.where
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.root
def test_what_a_killed_packer_left_open_goes_with_the_next(in_buildah: str) -> None:
    image = source.parse(in_buildah, Programs())
    code = (
        "import os, signal; from sqshforge.host import programs\n"
        "from sqshforge.image import address\n"
        f"with address.parse({in_buildah!r}, programs.Programs()).open():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    assert len(containers(image)) == 1
    with image.open():
        pass
    assert containers(image) == []


@pytest.mark.processes
def test_the_container_of_a_killed_packer_goes_with_the_next(in_carrying: source.Source) -> None:
    name = in_carrying.config().reference.removeprefix("dockerd://")
    code = (
        "import io, os, signal; from sqshforge.host.programs import Programs\n"
        "from tests.support.engines import Unmounted\n"
        "class Killer(io.RawIOBase):\n"
        "    def write(self, data): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"with Unmounted({name!r}, Programs()).open() as content:\n"
        "    content.write_payload(Killer())\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -9
    assert len(containers(in_carrying)) == 1
    with in_carrying.open() as content:
        assert isinstance(content, source.Remote)
        content.write_payload(io.BytesIO())
    assert containers(in_carrying) == []


@pytest.mark.processes
def test_a_mount_ends_with_a_killed_packer(tmp_path: Path) -> None:
    folder, work = tmp_path / "image", tmp_path / "work"
    (folder / "etc").mkdir(parents=True)
    work.mkdir()
    code = (
        "import os, pathlib, signal; from sqshforge.host import programs\n"
        "from sqshforge.image import overlay\n"
        f"folder, work = pathlib.Path({str(folder)!r}), pathlib.Path({str(work)!r})\n"
        "with overlay.mounted([folder], work, programs.Programs()) as stack:\n"
        "    print(stack.merge(), flush=True)\n"
        "    assert (stack.place / 'root/etc').is_dir()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -9
    merged = Path(killed.stdout.strip())
    assert merged.name == "root"
    assert until(lambda: not merged.exists())
    assert list(work.iterdir()) == []
    assert engines.mounts(tmp_path) == []


@pytest.mark.processes
def test_layers_that_cannot_be_mounted_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with (
        pytest.raises(WorkError, match="cannot be mounted"),
        overlay.mounted([tmp_path / "nowhere"], tmp_path / "work", Programs()),
    ):
        pass


@pytest.mark.processes
@pytest.mark.root
@each
def test_what_another_packer_has_open_stays(image: source.Source, tmp_path: Path) -> None:
    with image.open() as content:
        with image.open():
            pass
        assert issue(content, tmp_path) == "tiny"


@pytest.mark.parametrize("text", ["s3://debian", "ocifolder:x", "a/b", "http://x", "rootfs"])
def test_an_unknown_kind_of_source_is_answered_with_the_known_ones(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        source.parse(text, Programs())
    assert text in caught.value.what
    assert all(kind in caught.value.fix for kind in ("dockerd://", "buildah://", "rootfs:"))


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["sqshforge-no-such-image", "UPPER", "a b", "--help", "", "x:y:z", "localhost:1/x"]
)
@pytest.mark.parametrize("scheme", ["buildah", "dockerd"])
def test_an_image_that_is_not_there(scheme: str, name: str, docker: str) -> None:
    with pytest.raises(RequestError, match=f"has no image '{name}'"):
        source.parse(f"{scheme}://{name}", Programs()).config()


NONSENSE = ["", "no json", "[]", "[null]", "{}", "7", '{"Id": "x", "Size": "big"}']


@pytest.mark.parametrize("printed", NONSENSE)
def test_a_daemon_that_answers_nonsense(printed: str) -> None:
    with (
        docker_api.answering({"/x/json": printed.encode(), "/history": b"[]"}),
        pytest.raises(WorkError, match=r"is invalid|unexpected answer from docker"),
    ):
        source.parse("dockerd://x", Programs()).config()


def test_a_daemon_that_fails() -> None:
    with docker_api.answering({}) as host, pytest.raises(WorkError, match="out of order") as caught:
        source.parse("dockerd://x", Programs()).config()
    assert caught.value.where == host


@pytest.mark.processes
@pytest.mark.parametrize("printed", [*NONSENSE[:6], '[{"Id": "x", "Size": "big"}]', "[{}]"])
def test_an_engine_that_answers_nonsense(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "buildah"
    stand_in.write_text(f"#!/bin/sh\necho '{printed}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(WorkError, match=r"is invalid|unexpected answer from docker"):
        source.parse("buildah://x", Programs()).config()


@pytest.mark.processes
def test_a_storage_that_cannot_be_read_is_not_a_missing_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "storage.conf"
    settings.write_text(
        '[storage]\ndriver = "overlay"\ngraphroot = "/proc/x"\nrunroot = "/proc/y"\n'
        'rootless_storage_path = "/proc/x"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(settings))
    with pytest.raises(WorkError, match="/proc/"):
        source.parse("buildah://x", Programs()).config()


class Nothing(Programs):
    """A machine without any engine."""

    def which(self, program: str) -> Path | None:
        return None

    def all(self, program: str) -> list[Path]:
        return []


def test_an_engine_that_is_not_installed() -> None:
    with pytest.raises(MissingError, match="not installed") as caught:
        source.parse("buildah://x", Nothing()).config()
    assert "apt-get install" in caught.value.fix


def test_a_folder_that_is_no_root_file_system(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RequestError, match="no root file system"):
            source.parse(f"rootfs:{place}", Programs()).config()


def test_a_folder_is_as_new_as_its_newest_entry_and_as_large_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/a").write_bytes(bytes(1000))
    (tmp_path / "etc/b").symlink_to("/nowhere")
    os.utime(tmp_path / "etc/b", (2e9, 2e9), follow_symlinks=False)
    config = source.parse(f"rootfs:{tmp_path}", Programs()).config()
    assert config.created == 2_000_000_000
    assert 1000 <= config.size < 100_000


@pytest.mark.processes
@pytest.mark.root
def test_the_private_daemon_leaves_nothing_even_after_a_failure() -> None:
    with pytest.raises(KeyError), engines.daemon() as host:
        folder = Path(host.removeprefix("unix://")).parent
        assert stat.S_ISSOCK((folder / "s").stat().st_mode)
        with socket.socket(socket.AF_UNIX) as answering:
            answering.connect(str(folder / "s"))
        raise KeyError
    assert not folder.exists()
    assert engines.mounts(folder) == []
