"""Logging in to AWS's registry with AWS's own tool, and what its refusals mean."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest

from sqshforge.build import ecr
from sqshforge.errors import MissingError, SqshforgeError, WorkError
from sqshforge.host.programs import Programs
from tests.support.ecr_server import HOST, ROLE, SMP, Server
from tests.support.ecr_server import aws_fixture as aws_fixture
from tests.support.ecr_server import server_fixture as server_fixture

pytestmark = pytest.mark.processes

PASSWORD = "no-one-may-see-this-password"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A program that records its arguments and input, and prints its input."""
    path = tmp_path / "docker"
    notes = f'echo "$@" > "{tmp_path}/argv"; cat > "{tmp_path}/stdin"'
    says = f'cat "{tmp_path}/stdin" >&2; exit $(cat "{tmp_path}/code" 2>&- || echo 0)'
    path.write_text(f"#!/bin/sh\n{notes}\n{says}\n")
    path.chmod(0o755)
    return path


def token() -> dict[str, object]:
    secret = base64.b64encode(f"AWS:{PASSWORD}".encode()).decode()
    data = {"authorizationToken": secret, "expiresAt": 2e9, "proxyEndpoint": f"https://{HOST}"}
    return {"authorizationData": [data]}


def refusal(kind: str, message: str) -> dict[str, str]:
    return {"__type": kind, "message": message}


def test_a_login_is_for_the_host_and_the_region_of_the_image(
    aws: Server, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    aws.answer(200, token())
    ecr.login(SMP, engine, Programs())
    assert "/us-west-2/ecr/aws4_request" in aws.seen[0]["Authorization"]
    assert aws.seen[0]["X-Amz-Target"].endswith(".GetAuthorizationToken")
    argv = (tmp_path / "argv").read_text()
    assert argv == f"login --username AWS --password-stdin {HOST}\n"
    assert (tmp_path / "stdin").read_text() == PASSWORD


def test_an_engine_that_refuses_is_reported_without_the_password(
    aws: Server, engine: Path, tmp_path: Path
) -> None:
    aws.answer(200, token())
    (tmp_path / "code").write_text("1")
    with pytest.raises(WorkError, match=f"docker cannot log in at {HOST}") as caught:
        ecr.login(SMP, engine, Programs())
    assert (tmp_path / "stdin").read_text() == PASSWORD
    assert PASSWORD not in "\n".join([*caught.value.lines(), repr(vars(caught.value))])
    assert caught.value.where == "[password]"


@pytest.mark.parametrize(
    ("body", "what", "fix"),
    [
        (
            refusal(
                "AccessDeniedException",
                f"{ROLE} is not authorized to perform: ecr:GetAuthorizationToken on resource: *"
                " because no identity-based policy allows the ecr:GetAuthorizationToken action",
            ),
            "lacks the permission ecr:GetAuthorizationToken",
            "docs/images/iam/ecr-pull.json",
        ),
        (
            refusal(
                "AccessDeniedException",
                f"{ROLE} is not authorized to perform: ecr:GetAuthorizationToken on resource: *"
                " with an explicit deny in a service control policy",
            ),
            "forbids ecr:GetAuthorizationToken",
            "administrator",
        ),
        (
            refusal(
                "ExpiredTokenException", "The security token included in the request is expired"
            ),
            "has expired",
            "aws sso login",
        ),
        (
            refusal(
                "UnrecognizedClientException",
                "The security token included in the request is invalid.",
            ),
            "does not accept the credentials",
            "get-caller-identity",
        ),
        (refusal("RequestExpired", "Request has expired."), "has expired", "is the clock right"),
        (refusal("ServerException", "Out of order"), "aws cannot log in", "docs/images/ecr.md"),
        ({"authorizationData": []}, "aws cannot log in", "docs/images/ecr.md"),
    ],
)
def test_what_aws_refuses_is_reported_with_its_fix(
    body: dict[str, object], what: str, fix: str, aws: Server, engine: Path, tmp_path: Path
) -> None:
    aws.answer(400 if "__type" in body else 200, body)
    with pytest.raises(WorkError, match=what) as caught:
        ecr.login(SMP, engine, Programs())
    assert fix in caught.value.fix
    assert str(body.get("message", "")) in caught.value.where
    assert "Traceback" not in caught.value.where
    assert not (tmp_path / "argv").exists()


def test_without_credentials_the_ways_to_them_are_named(
    aws: Server, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(MissingError, match="no AWS credentials") as caught:
        ecr.login(SMP, engine, Programs())
    assert "Unable to locate credentials" in caught.value.where
    assert "aws sso login" in caught.value.fix
    assert aws.seen == []


@pytest.mark.parametrize(
    ("is_old", "kind", "what"),
    [(True, WorkError, "has expired"), (False, MissingError, "no AWS credentials")],
)
def test_a_session_that_is_over_or_was_never_begun_is_reported(
    is_old: bool,
    kind: type[SqshforgeError],
    what: str,
    aws: Server,
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = "https://example.test/start"
    cache = tmp_path / "home" / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    if is_old:
        facts = {"startUrl": start, "region": "us-west-2", "accessToken": "a"}
        kept = json.dumps({**facts, "expiresAt": "2020-01-01T00:00:00UTC"})
        (cache / f"{hashlib.sha1(start.encode()).hexdigest()}.json").write_text(kept)
    (tmp_path / "home" / ".aws" / "config").write_text(
        f"[profile p]\nsso_start_url = {start}\nsso_region = us-west-2\n"
        "sso_account_id = 111122223333\nsso_role_name = build\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "p")
    with pytest.raises(kind, match=what) as caught:
        ecr.login(SMP, engine, Programs())
    assert "SSO" in caught.value.where
    assert "aws sso login" in caught.value.fix


def test_a_broken_aws_is_reported_by_its_own_last_words(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "aws"
    broken.write_text("#!/bin/sh\necho first >&2\necho '/opt/aws: not found' >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(WorkError, match="aws cannot log in") as caught:
        ecr.login(SMP, engine, Programs())
    assert caught.value.where == "/opt/aws: not found"


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_PROFILE"])
def test_half_a_configuration_is_none(
    name: str, aws: Server, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv(name, "no-such")
    with pytest.raises(MissingError, match="no AWS credentials"):
        ecr.login(SMP, engine, Programs())


def test_a_region_that_does_not_answer_is_reported(
    aws: Server, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_ECR", "http://127.0.0.1:1")
    with pytest.raises(WorkError, match="us-west-2 cannot be reached") as caught:
        ecr.login(SMP, engine, Programs())
    assert "127.0.0.1:1" in caught.value.where


def test_without_aws_its_package_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="aws is not installed") as caught:
        ecr.login(SMP, engine, Programs())
    assert "apt-get install awscli" in caught.value.fix
