"""An ordinary user's logins at registries, on a machine where root has used buildah."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.ordinary_user import existing

pytestmark = pytest.mark.processes

ASK = """
import subprocess, sys
from sqshforge.network import access
if sys.argv[1] == "chosen":
    access.choose_login_file()
words = ["skopeo", "inspect", "--tls-verify=false", "docker://127.0.0.1:9/none"]
print(subprocess.run(words, capture_output=True, text=True).stderr)
"""


def test_logins_are_read_where_they_can_be(as_root: None) -> None:
    """Outside of a login session, as in a Slurm job."""
    Path("/run/containers").mkdir(mode=0o700, exist_ok=True)  # as root's buildah makes it
    with existing() as user:
        closed = user.run(sys.executable, "-c", ASK, "usual", XDG_RUNTIME_DIR="")
        assert "auth.json: permission denied" in closed.stdout, closed
        asked = user.run(sys.executable, "-c", ASK, "chosen", XDG_RUNTIME_DIR="")
        assert "connection refused" in asked.stdout, asked
        # The doctor makes the same choice, but changes nothing.
        assert not list(user.cache.rglob("*login*"))
