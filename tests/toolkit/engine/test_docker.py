"""Requests to a docker daemon other than builds, through its API."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sqshforge import engine
from sqshforge.engine.docker import Docker
from sqshforge.engine.types import Build
from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from tests.support import docker_api
from tests.support.archives import Image, file, folder, layer, symlink, write
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

pytestmark = pytest.mark.processes

NAME = "localhost/sqshforge-test-api:1"
CONTENT = layer(
    folder("opt", 0o750),
    folder("opt/sub", 0o700),
    file("opt/sub/tool", b"#!/bin/sh\n", mode=0o755),
    symlink("opt/link", "sub/tool"),
    file("other", b"other"),
)


@pytest.fixture
def chosen(docker: str) -> Docker:
    found = engine.choose("docker", Programs())
    assert isinstance(found, Docker)
    return found


@pytest.fixture
def image(chosen: Docker, tmp_path: Path) -> str:
    write(Image([CONTENT], tag="api"), "docker-archive", tmp_path / "image.tar")
    chosen.restore(tmp_path / "image.tar")
    chosen.tag("test:api", NAME)
    return NAME


def test_an_image_is_saved_and_taken_in_again(chosen: Docker, image: str, tmp_path: Path) -> None:
    before = chosen.image(image)
    assert before is not None and before.id.startswith("sha256:")
    chosen.save(image, tmp_path / "saved.tar")
    Programs().capture([chosen.client, "image", "rm", image, "test:api"])
    assert chosen.image(image) is None
    chosen.restore(tmp_path / "saved.tar")
    assert chosen.image(image) == before


def test_a_folder_is_copied_out(chosen: Docker, image: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    chosen.copy_out(image, "/opt", place)
    assert {str(one.relative_to(place)) for one in place.rglob("*")} == {"sub", "sub/tool", "link"}
    assert (place / "sub/tool").read_text() == "#!/bin/sh\n"
    assert stat.S_IMODE((place / "sub/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((place / "sub").stat().st_mode) == 0o700
    assert (place / "link").readlink() == Path("sub/tool")
    assert Programs().capture([chosen.client, "ps", "--all", "--quiet"]) == ""


def test_a_folder_that_the_image_has_not(chosen: Docker, image: str, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="has no /nowhere"):
        chosen.copy_out(image, "/nowhere", tmp_path)
    assert Programs().capture([chosen.client, "ps", "--all", "--quiet"]) == ""


def test_a_place_that_cannot_be_copied_to(chosen: Docker, image: str, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="tar failed"):
        chosen.copy_out(image, "/opt", tmp_path / "none")


def test_a_root_file_system_becomes_an_image(chosen: Docker, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(CONTENT)
    chosen.load(tmp_path / "root.tar", "localhost/sqshforge-test-root:7")
    chosen.save("localhost/sqshforge-test-root:7", tmp_path / "saved.tar")
    with tarfile.open(tmp_path / "saved.tar") as saved:
        manifest = saved.extractfile("manifest.json")
        assert manifest is not None
        (name,) = json.load(manifest)[0]["Layers"]
        content = saved.extractfile(name)
        assert content is not None
        with tarfile.open(fileobj=io.BytesIO(content.read())) as tar:
            assert "opt/sub/tool" in tar.getnames()


@pytest.mark.parametrize("method", ["restore", "load"])
def test_what_is_no_tar_is_refused_with_docker_s_words(
    method: str, chosen: Docker, docker: str, tmp_path: Path
) -> None:
    (tmp_path / "x.tar").write_bytes(b"no tar " * 1000)
    words = [tmp_path / "x.tar", *(["localhost/x:1"] if method == "load" else [])]
    with pytest.raises(WorkError, match="docker") as caught:
        getattr(chosen, method)(*words)
    assert caught.value.where == docker


def test_an_image_that_is_not_there_cannot_be_saved(chosen: Docker, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="docker cannot save localhost/none:1"):
        chosen.save("localhost/none:1", tmp_path / "x.tar")


def test_a_failing_daemon_s_own_words_are_reported(tmp_path: Path) -> None:
    with docker_api.answering({}) as host:
        chosen = engine.choose("docker", Programs())
        with pytest.raises(WorkError, match="out of order") as caught:
            chosen.storage()
    assert caught.value.where == host


CONTAINERD = {
    "Driver": "overlayfs",
    "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
}
OVERLAY2 = {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}


@pytest.mark.parametrize(
    ("facts", "output"),
    [
        (CONTAINERD, ["--output", "type=image,compression=uncompressed"]),
        (OVERLAY2, []),
        ({"Driver": "vfs", "DriverStatus": None}, []),
    ],
)
def test_containerd_s_store_does_not_compress_what_is_packed_next(
    facts: dict[str, object], output: list[str], tmp_path: Path
) -> None:
    """Layers of a GPU image would be compressed for minutes, and unpacked again by pack."""
    said = f'printf "%s\\n" "$BUILDX_NO_DEFAULT_ATTESTATIONS" "$@" > {tmp_path}/asked'
    client = client_of(tmp_path / "docker", said)
    with docker_api.answering({"/info": json.dumps(facts).encode()}):
        build = Build(context=tmp_path / "context", name="localhost/x:1")
        Docker(client, Programs()).build(build, lambda line: None)
    attestations, *words = (tmp_path / "asked").read_text().splitlines()
    assert attestations == "1"  # else each build has another ID
    shared = ["build", "--progress", "plain", "--network", "host", "--tag", "localhost/x:1"]
    assert words == [*shared, *output, str(tmp_path / "context")]


def client_of(place: Path, script: str) -> Path:
    """Write a stand-in for docker's client."""
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return place


# Docker 29.1, for a Dockerfile of which the step that failed has more lines than an error shows.
FAILED = (
    """\
#8 [system 1/3] RUN apt-get install none && apt-get clean
#8 1.734 E: Unable to locate package none
#8 ERROR: process "/bin/sh -c apt-get install none" did not complete successfully: exit code: 100
------
 > [system 1/3] RUN apt-get install none && apt-get clean:
1.734 E: Unable to locate package none
------
Dockerfile:7
--------------------
"""
    + "".join(f"{n:4} | >>>     && step {n} \\\n" for n in range(7, 40))
    + """\
--------------------
ERROR: failed to build: failed to solve: process "/bin/sh -c apt-get install none" did not complete
"""
)


def test_why_a_step_failed_is_shown_and_not_the_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "said").write_text(FAILED)
    client = client_of(tmp_path / "docker", f"cat {tmp_path}/said; exit 1")
    build = Build(context=tmp_path, name="localhost/x:1")
    with (
        docker_api.answering({"/info": json.dumps(OVERLAY2).encode()}),
        pytest.raises(WorkError) as caught,
    ):
        Docker(client, Programs()).build(build, lambda line: None)
    assert "E: Unable to locate package none" in caught.value.what
    assert "ERROR: failed to build" in caught.value.what
    assert "step 39" not in caught.value.what and "Dockerfile:7" not in caught.value.what


def test_the_command_line_starts_without_the_sdk(docker: str) -> None:
    code = (
        "import sys; from sqshforge.cli.main import main\n"
        "sys.argv[1:] = ['--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([one for one in ('docker', 'requests', 'paramiko') if sys.modules.get(one)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    code = (
        "import sys; from sqshforge.engine.daemon import Daemon\n"
        "from sqshforge.host.programs import Programs\n"
        "Daemon.connect(Programs())\n"
        "print([one for one in ('docker', 'paramiko') if sys.modules.get(one)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['docker']"
