"""A stand-in for AWS on the loopback: login and registry in one server."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sqshforge.build import ecr

HOST = "658645717510.dkr.ecr.us-west-2.amazonaws.com"
NAME = "smdistributed-modelparallel"
SMP = ecr.Repository(account="658645717510", region="us-west-2", host=HOST, name=NAME)
ROLE = "User: arn:aws:sts::111122223333:assumed-role/build/i-0123"


@dataclass
class Server:
    """A stand-in for AWS: it gives one answer to everything, and records its requests."""

    code: int = 200
    body: str = "{}"
    port: int = 0
    seen: list[dict[str, str]] = field(default_factory=list)

    def answer(self, code: int, body: object) -> None:
        self.code, self.body = code, body if isinstance(body, str) else json.dumps(body)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture(name="server")
def server_fixture() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            state.seen.append(dict(self.headers.items()))
            is_open = self.path == "/v2/" and state.code != 401
            code, body = (200, b"{}") if is_open else (state.code, state.body.encode())
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


@pytest.fixture(name="aws")
def aws_fixture(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Make AWS's own tool, without any user's configuration, talk to the server instead of AWS."""
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
