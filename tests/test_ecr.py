"""AWS's registry: whose host it is, the login through AWS's own tool, what a refusal means."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sqshforge import ecr
from sqshforge.errors import MissingError, RequestError, SqshforgeError, WorkError
from sqshforge.programs import Programs
from tests.engines import CLIENT
from tests.engines import docker_host_fixture as docker_host_fixture

HOST = "658645717510.dkr.ecr.us-west-2.amazonaws.com"
NAME = "smdistributed-modelparallel"
SMP = ecr.Repository(account="658645717510", region="us-west-2", host=HOST, name=NAME)
PASSWORD = "no-one-may-see-this-password"
ROLE = "User: arn:aws:sts::111122223333:assumed-role/build/i-0123"


@dataclass
class Server:
    """What stands in for AWS on the loopback: one answer to everything, and what it was asked."""

    code: int = 200
    body: str = "{}"
    port: int = 0
    seen: list[dict[str, str]] = field(default_factory=list)

    def answer(self, code: int, body: object) -> None:
        self.code, self.body = code, body if isinstance(body, str) else json.dumps(body)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            state.seen.append(dict(self.headers.items()))
            open_door = self.path == "/v2/" and state.code != 401
            code, body = (200, b"{}") if open_door else (state.code, state.body.encode())
            self.send_response(code)
            if code == 401:
                self.send_header("WWW-Authenticate", f'Basic realm="https://{HOST}/"')
            self.send_header("Content-Type", "application/json")
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = reply  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def aws(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """AWS's own tool, with nobody's configuration, talks to the server instead of to AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    variables = {
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "example",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_ECR": f"http://{server.address}",
        "AWS_MAX_ATTEMPTS": "1",
        "HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A program that notes how it was called, and says all that it knows."""
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


@pytest.mark.parametrize(
    ("host", "account", "region"),
    [
        (HOST, "658645717510", "us-west-2"),
        ("111122223333.dkr.ecr.cn-north-1.amazonaws.com.cn", "111122223333", "cn-north-1"),
        ("111122223333.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "111122223333", "us-gov-west-1"),
    ],
)
@pytest.mark.parametrize("end", ["", ":2.4.1-gpu", "@sha256:" + "a" * 64, ":1@sha256:" + "a" * 64])
@pytest.mark.parametrize("name", ["smp", "team/smp"])
def test_a_private_image_is_told_by_its_host(
    host: str, account: str, region: str, end: str, name: str
) -> None:
    expected = ecr.Repository(account=account, region=region, host=host, name=name)
    assert ecr.parse(f"{host}/{name}{end}") == expected


@pytest.mark.parametrize(
    "reference",
    [
        "debian:bookworm-slim",
        "public.ecr.aws/neuron/pytorch-training-neuronx:2.1.2",
        f"mirror.test/{HOST}/smp:1",
        f"{HOST}.test/smp:1",
        HOST,
        f"{HOST}/",
        "658645717510.dkr.ecr.--region.amazonaws.com/smp",
        "",
    ],
)
def test_what_is_no_private_image_is_left_alone(reference: str) -> None:
    assert ecr.parse(reference) is None


@pytest.mark.parametrize(
    "account", ["", "65864571751", "6586457175100", "{account}", "65864571751\u0660"]
)
def test_an_account_that_is_none_is_told(account: str) -> None:
    reference = f"{account}.dkr.ecr.us-west-2.amazonaws.com/smp:1"
    with pytest.raises(RequestError, match="12 digits") as caught:
        ecr.parse(reference)
    assert caught.value.where == reference


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


def test_an_engine_that_refuses_is_told_without_the_password(
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
    ("body", "what", "mend"),
    [
        (
            refusal(
                "AccessDeniedException",
                f"{ROLE} is not authorized to perform: ecr:GetAuthorizationToken on resource: *"
                " because no identity-based policy allows the ecr:GetAuthorizationToken action",
            ),
            "lacks the permission ecr:GetAuthorizationToken",
            "docs/iam/ecr-pull.json",
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
        (refusal("ServerException", "Out of order"), "aws cannot log in", "docs/ecr.md"),
        ({"authorizationData": []}, "aws cannot log in", "docs/ecr.md"),
    ],
)
def test_what_aws_refuses_is_told_with_its_cure(
    body: dict[str, object], what: str, mend: str, aws: Server, engine: Path, tmp_path: Path
) -> None:
    aws.answer(400 if "__type" in body else 200, body)
    with pytest.raises(WorkError, match=what) as caught:
        ecr.login(SMP, engine, Programs())
    assert mend in caught.value.mend
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
    assert "aws sso login" in caught.value.mend
    assert aws.seen == []


@pytest.mark.parametrize(
    ("is_old", "kind", "what"),
    [(True, WorkError, "has expired"), (False, MissingError, "no AWS credentials")],
)
def test_a_session_that_is_over_or_was_never_begun_is_told(
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
    assert "aws sso login" in caught.value.mend


def test_a_broken_aws_is_told_by_its_own_last_words(
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


def test_a_region_that_does_not_answer_is_told(
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
    assert "apt-get install awscli" in caught.value.mend


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


@pytest.mark.parametrize("engine", ["docker", "buildah", "skopeo"])
@pytest.mark.parametrize(("code", "body", "kind", "what"), REFUSALS)
def test_what_an_engine_says_of_a_refused_pull_is_understood(
    code: int,
    body: object,
    kind: type[SqshforgeError],
    what: str,
    engine: str,
    server: Server,
    docker_host: str,
) -> None:
    server.answer(code, body)
    reference = f"{server.address}/{NAME}:2.4.1"
    argv: dict[str, list[str | Path]] = {
        "docker": [CLIENT, "--host", docker_host, "pull", reference],
        "buildah": ["buildah", "pull", "--tls-verify=false", reference],
        "skopeo": ["skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"],
    }
    pulled = Programs().attempt(argv[engine])
    assert pulled.code != 0
    meaning = ecr.explain(SMP, pulled.err)
    assert meaning is not None
    assert type(meaning) is kind
    assert what in meaning.what
    assert meaning.where in pulled.err
    assert "{" not in meaning.mend


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


def test_the_policy_allows_what_is_named_and_no_more(root: Path) -> None:
    policy = json.loads((root / "docs" / "iam" / "ecr-pull.json").read_text())
    login, pull = policy["Statement"]
    assert policy["Version"] == "2012-10-17"
    assert (login["Effect"], pull["Effect"]) == ("Allow", "Allow")
    assert (login["Action"], login["Resource"]) == (ecr.ACTIONS[0], "*")
    assert tuple(pull["Action"]) == ecr.ACTIONS[1:]
    assert pull["Resource"] == f"arn:aws:ecr:*:{SMP.account}:repository/{SMP.name}"


def test_the_page_names_every_permission(root: Path) -> None:
    page = (root / "docs" / "ecr.md").read_text()
    assert [action for action in ecr.ACTIONS if f"`{action}`" not in page] == []
