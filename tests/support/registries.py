"""A real registry on the loopback, and a way to push images into it."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from sqshforge.host.programs import Programs, stop
from tests.support.ports import free_ports


@pytest.fixture(name="registry", scope="module")
def registry_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of an empty registry, which skopeo is configured to use without TLS."""
    place = tmp_path_factory.mktemp("registry")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    (place / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{address}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: {place}/data}}, delete: {{enabled: true}}}}\n"
    )
    (place / ".config/containers").mkdir(parents=True)
    (place / ".config/containers/registries.conf").write_text(
        f"[[registry]]\nlocation = '{address}'\ninsecure = true\n"
    )
    with pytest.MonkeyPatch.context() as patch, (place / "log").open("wb") as log:
        patch.setenv("HOME", str(place))
        server = subprocess.Popen(
            ["docker-registry", "serve", place / "config.yml"], stdout=log, stderr=log
        )
        try:
            _await(address)
            yield address
        finally:
            stop(server)


def _await(address: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://{address}/v2/", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError("the registry does not answer")


def push(address: str, name: str, *options: str) -> str:
    """Copy an image to a name in the registry; returns its address there."""
    program = Programs()
    program.capture(["skopeo", "--insecure-policy", "copy", *options, address, f"docker://{name}"])
    return f"docker://{name}"
