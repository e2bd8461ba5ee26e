"""What engines print when AWS's registry refuses a pull: understood, and reported with a fix."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from sqshforge.build import ecr
from sqshforge.engine.docker import Docker
from sqshforge.errors import MissingError, RequestError, SqshforgeError, WorkError
from sqshforge.host.programs import Programs
from tests.support.ecr_server import HOST, NAME, ROLE, SMP, Server
from tests.support.ecr_server import server_fixture as server_fixture
from tests.support.engines import CLIENT
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture


def error(code: str, message: str) -> dict[str, object]:
    return {"errors": [{"code": code, "message": message}]}


def denied(action: str, why: str) -> dict[str, object]:
    resource = f"arn:aws:ecr:us-west-2:658645717510:repository/{NAME}"
    said = f"{ROLE} is not authorized to perform: {action} on resource: {resource} because {why}"
    return error("DENIED", said)


REFUSALS = [
    (
        403,
        denied("ecr:BatchGetImage", "no identity-based policy allows the ecr:BatchGetImage action"),
        WorkError,
        f"lacks the permission ecr:BatchGetImage for {HOST}/{NAME}",
    ),
    (
        403,
        denied("ecr:BatchGetImage", "no resource-based policy allows the ecr:BatchGetImage action"),
        WorkError,
        f"does not open {NAME}",
    ),
    (
        403,
        denied("kms:Decrypt", "no identity-based policy allows the kms:Decrypt action"),
        WorkError,
        "lacks the permission kms:Decrypt",
    ),
    (
        403,
        error("DENIED", "Your authorization token has expired. Reauthenticate and try again."),
        WorkError,
        "lasts 12 hours",
    ),
    (401, "Not Authorized", MissingError, f"no login at {HOST}"),
    (404, error("MANIFEST_UNKNOWN", "Requested image not found"), RequestError, "its tag moved"),
    (
        404,
        error("NAME_UNKNOWN", f"The repository with name '{NAME}' does not exist in the registry"),
        RequestError,
        "not in us-west-2",
    ),
]


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["docker", "buildah", "skopeo"])
@pytest.mark.parametrize(("code", "body", "kind", "what"), REFUSALS)
def test_what_an_engine_says_of_a_refused_pull_is_understood(
    code: int,
    body: object,
    kind: type[SqshforgeError],
    what: str,
    engine: str,
    server: Server,
    docker: str,
) -> None:
    server.answer(code, body)
    reference = f"{server.address}/{NAME}:2.4.1"
    if engine == "docker":
        said = Docker(CLIENT, Programs()).pull(reference, "localhost/none:1")
        assert said is not None
    else:
        argv: dict[str, list[str | Path]] = {
            "buildah": ["buildah", "pull", "--tls-verify=false", reference],
            "skopeo": ["skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"],
        }
        pulled = Programs().attempt(argv[engine])
        assert pulled.code != 0
        said = pulled.err
    meaning = ecr.explain(SMP, said)
    assert meaning is not None
    assert type(meaning) is kind
    assert what in meaning.what
    assert meaning.where in said
    assert "{" not in meaning.fix


@pytest.mark.processes
def test_a_login_counts_that_was_made_after_docker_was_spoken_to(
    server: Server, docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ECR login is such a one: it is made just before the pull."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    server.answer(401, "Not Authorized")
    chosen = Docker(CLIENT, Programs())
    assert chosen.pull(f"{server.address}/{NAME}:1", "localhost/none:1") is not None
    assert not any("Authorization" in one for one in server.seen)
    secret = base64.b64encode(b"AWS:password").decode()
    settings = {"auths": {server.address: {"auth": secret}}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert chosen.pull(f"{server.address}/{NAME}:1", "localhost/none:1") is not None
    assert f"Basic {secret}" in [one.get("Authorization") for one in server.seen]
    for used in ("other", "AWS:another"):  # and one that replaces it
        secret = base64.b64encode(f"AWS:{used}".encode()).decode()
        settings = {"auths": {server.address: {"auth": secret}}}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        assert chosen.pull(f"{server.address}/{NAME}:1", "localhost/none:1") is not None
        assert f"Basic {secret}" in [one.get("Authorization") for one in server.seen]


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (
            'failed to resolve reference "host/smp:1": host/smp:1: not found',  # containerd
            "its tag moved",
        ),
        (
            "An error occurred (RepositoryNotFoundException) when calling the BatchGetImage",
            "its tag moved",
        ),
        (
            f"denied: {ROLE} is not authorized to perform: ecr:GetDownloadUrlForLayer on resource",
            "lacks the permission ecr:GetDownloadUrlForLayer",
        ),
        (f"dial tcp: lookup {HOST} on 10.0.0.2:53: no such host", "cannot be reached"),
    ],
)
def test_words_that_cannot_be_had_here_are_understood(said: str, what: str) -> None:
    meaning = ecr.explain(SMP, f"Trying to pull\n{said}\nexit status 1\n")
    assert meaning is not None
    assert what in meaning.what
    assert meaning.where == said


@pytest.mark.parametrize(
    "said", ["", "write /layer.tar: no space left on device", "error pulling: unexpected EOF"]
)
def test_other_words_are_left_to_others(said: str) -> None:
    assert ecr.explain(SMP, said) is None
