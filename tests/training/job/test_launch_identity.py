"""Which instance this is, according to EC2's metadata service: asked of a server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support import instance_trees
from training.job.machine.instances import instance_type

TOKEN = "a-token"


class Service(ThreadingHTTPServer):
    """Answers as IMDSv2 does: nothing without a token from a PUT request."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.type = "p3dn.24xlarge"
        self.delay = 0.0
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that no longer waits."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        wanted = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(TOKEN if self.path == "/latest/api/token" and wanted else "")

    def do_GET(self) -> None:
        known = self.headers["X-aws-ec2-metadata-token"] == TOKEN
        here = self.path == "/latest/meta-data/instance-type"
        self._answer(self.server.type if known and here else "")

    def _answer(self, text: str) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        time.sleep(self.server.delay)
        self.send_response(200 if text else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def found(root: Path, service: Service, **environment: str) -> tuple[str, str]:
    place = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}
    # No proxy is ever asked: the service belongs to this very machine.
    return instance_type(root, place | {"http_proxy": "http://127.0.0.1:9"} | environment)


@pytest.fixture(params=["Xen", "Amazon EC2", ""])
def ec2(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An EC2 machine whose firmware does not name its type."""
    if request.param:
        instance_trees.dmi(tmp_path, request.param, "HVM domU")
    else:
        instance_trees.write(tmp_path / "sys/hypervisor/type", "xen")
    return tmp_path


def test_the_service_is_asked(ec2: Path, service: Service) -> None:
    assert found(ec2, service) == ("p3dn.24xlarge", "as the metadata service says")
    asked = ["PUT /latest/api/token", "GET /latest/meta-data/instance-type"]
    assert service.asked == asked


def test_it_is_not_asked_where_it_need_not_be(tmp_path: Path, service: Service) -> None:
    instance_trees.dmi(tmp_path / "nitro", "Amazon EC2", "p5.48xlarge")
    instance_trees.dmi(tmp_path / "other", "QEMU", "Standard PC")
    assert found(tmp_path / "nitro", service)[0] == "p5.48xlarge"
    assert found(tmp_path / "other", service)[0] == ""
    assert found(tmp_path / "nothing", service)[0] == ""
    assert found(tmp_path / "other", service, INSTANCE_TYPE="g5.xlarge")[0] == "g5.xlarge"
    assert service.asked == []


def test_it_may_be_forbidden(ec2: Path, service: Service) -> None:
    type, why = found(ec2, service, AWS_EC2_METADATA_DISABLED="TRUE")
    assert (type, service.asked) == ("", []) and "AWS_EC2_METADATA_DISABLED=true" in why


def test_a_slow_service_costs_a_second(tmp_path: Path, service: Service) -> None:
    instance_trees.dmi(tmp_path, "Xen", "HVM domU")
    service.delay = 0.7  # makes the second answer too late
    begun = time.monotonic()
    type, why = found(tmp_path, service)
    assert type == "" and "does not say: " in why and time.monotonic() - begun < 20


def test_a_service_that_is_none(tmp_path: Path, service: Service) -> None:
    instance_trees.dmi(tmp_path, "Xen", "HVM domU")
    service.type = "<html>"
    assert found(tmp_path, service) == (
        "",
        "the metadata service does not say: '<html>' is not a type",
    )
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}
    type, why = instance_type(tmp_path, environment)
    assert type == "" and "refused" in why
