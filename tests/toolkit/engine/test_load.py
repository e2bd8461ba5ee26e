"""An image that buildah makes from a root file system's tar, and what is left if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sqshforge.engine.buildah import Buildah
from sqshforge.host.programs import Programs
from tests.support.archives import file, folder, layer
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

NAME = "localhost/sqshforge-base:loaded"
LOAD = f"""\
import sys
from pathlib import Path
from sqshforge.engine.buildah import Buildah
from sqshforge.host.programs import Programs
Buildah.find(Programs()).load(Path(sys.argv[1]), "{NAME}")
"""


def containers() -> list[str]:
    return Programs().capture(["buildah", "containers", "--quiet"]).split()


def test_one_that_was_killed_is_made_by_the_next_call(storage: None, tmp_path: Path) -> None:
    """The first command makes the base image that way if no registry answers."""
    tar = tmp_path / "root.tar"
    tar.write_bytes(layer(folder("etc"), file("etc/large", os.urandom(200 << 20))))
    with subprocess.Popen([sys.executable, "-c", LOAD, tar], start_new_session=True) as process:
        end = time.monotonic() + 120
        while not containers():
            assert process.poll() is None and time.monotonic() < end
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and len(containers()) == 1
    buildah = Buildah.find(Programs())
    assert buildah.image(NAME) is None
    buildah.load(tar, NAME)
    image = buildah.image(NAME)
    assert image is not None and image.size > 200 << 20
    assert containers() == []
