"""Which engine builds: the requested one, or the one that is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sqshforge import engine
from sqshforge.engine.docker import Docker
from sqshforge.errors import MissingError, RequestError
from sqshforge.host.programs import Programs
from tests.support.engines import CLIENT
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

pytestmark = pytest.mark.processes


class Nothing(Programs):
    """A machine without any engine."""

    def which(self, program: str) -> Path | None:
        return None

    def all(self, program: str) -> list[Path]:
        return []


def without_buildkit(folder: Path) -> Path:
    """Make a docker client of version 28 whose buildx plugin is not installed."""
    client = folder / "docker"
    client.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Docker version 28.2.2, build e6534b4"; exit 0; fi\n'
        "echo \"docker: '$1' is not a docker command.\" >&2\n"
        "exit 1\n"
    )
    client.chmod(0o755)
    return client


def test_docker_is_taken_where_a_daemon_answers(docker: str) -> None:
    for name in (None, "", "docker"):
        chosen = engine.choose(name, Programs())
        assert chosen.name == "docker"
        assert str(chosen.storage()).startswith(str(Path(docker.removeprefix("unix://")).parent))


def test_buildah_is_taken_where_none_does(no_docker: None) -> None:
    assert engine.choose(None, Programs()).name == "buildah"


def test_buildah_is_taken_where_it_is_asked_for(docker: str) -> None:
    assert engine.choose("buildah", Programs()).name == "buildah"


@pytest.mark.parametrize("name", ["podman", "Docker", " "])
def test_an_unknown_engine_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(RequestError, match="unknown engine") as caught:
        engine.choose(name, Programs())
    assert caught.value.fix == "engines are: docker, buildah"


def test_docker_without_a_daemon(no_docker: None) -> None:
    with pytest.raises(MissingError, match="no docker daemon answers") as caught:
        engine.choose("docker", Programs())
    assert caught.value.where == os.environ["DOCKER_HOST"]
    assert "systemctl start docker" in caught.value.fix
    assert "ENGINE=buildah" in caught.value.fix


@pytest.mark.parametrize("name", [None, "docker", "buildah"])
def test_a_machine_without_engines(name: str | None) -> None:
    with pytest.raises(MissingError) as caught:
        engine.choose(name, Nothing())
    assert "apt-get install" in caught.value.fix


def test_a_client_without_buildkit_is_passed_over(
    docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_buildkit(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{CLIENT.parent}")
    chosen = engine.choose(None, Programs())
    assert isinstance(chosen, Docker)
    assert chosen.client == CLIENT


def test_no_other_client_than_one_without_buildkit(
    docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = without_buildkit(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="BuildKit") as caught:
        engine.choose("docker", Programs())
    assert caught.value.where == str(client)
    assert "docker-buildx" in caught.value.fix
    with pytest.raises(MissingError, match="no container engine"):
        engine.choose(None, Programs())


PODMAN = """#!/bin/sh
echo 'Emulate Docker CLI using podman. Create /etc/containers/nodocker to quiet msg.' >&2
case $1 in
--version) echo 'podman version 5.4.2' ;;
buildx) echo 'buildah 1.39.3' ;;
*) exit 1 ;;
esac
"""


def test_podman_under_docker_s_name_is_not_taken_for_docker(
    docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "docker"
    client.write_text(PODMAN)
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{CLIENT.parent}")
    chosen = engine.choose(None, Programs())
    assert isinstance(chosen, Docker) and chosen.client == CLIENT
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(Programs, "all", lambda self, name: [tmp_path / name])
    assert engine.choose(None, Programs()).name == "buildah"
    with pytest.raises(MissingError, match=r"not Docker's.*podman version 5\.4\.2") as caught:
        engine.choose("docker", Programs())
    assert caught.value.where == str(client)
    assert "or ENGINE=buildah" in caught.value.fix


def test_an_image_that_an_engine_does_not_have(docker: str) -> None:
    for name in engine.NAMES:
        assert engine.choose(name, Programs()).image("localhost/sqshforge-none:latest") is None


@pytest.mark.parametrize("name", engine.NAMES)
def test_a_registry_that_does_not_answer(name: str, docker: str) -> None:
    chosen = engine.choose(name, Programs())
    said = chosen.pull("localhost:1/no/such:1", "localhost/sqshforge-none:latest")
    assert said is not None and "connection refused" in said
