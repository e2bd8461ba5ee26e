"""One checkout and two users: it works, or the error says whose files are in the way."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkouts
from tests.support.engines import storage_fixture as storage_fixture
from tests.support.ordinary_user import NAME, User
from tests.support.ordinary_user import nothing_stays_fixture as nothing_stays_fixture
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_docker", "storage")]


@pytest.fixture
def checkout(user: User) -> Iterator[Path]:
    """The user's checkout, a git repository, whose image is built in seconds."""
    root = checkouts.copy(user.home / "checkout", "")
    user.take(root)
    git = "git init -q && git add -A && git -c user.name=u -c user.email=u@x commit -qm one"
    done = as_user(user, root, "sh", "-c", git)
    assert done.returncode == 0, done.stderr
    yield root
    subprocess.run(["rm", "-rf", root], check=True)


def as_user(user: User, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = user.environment({"PYTHONPATH": ""})
    return subprocess.run(
        user.argv(*words),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def sqshforge(*words: str) -> list[str]:
    return [sys.executable, "-m", "sqshforge", *words]


def test_root_builds_in_a_user_s_checkout_and_is_in_that_user_s_way_after_it(
    user: User, checkout: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        sqshforge("build", checkouts.TARGET, "--engine", "buildah"),
        cwd=checkout,
        env={**os.environ, "HOME": str(tmp_path)},  # where git keeps the owners that it trusts
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Git refuses to read another user's repository, so the image must not claim a commit.
    record = checkout / "build" / checkouts.TARGET / "context/payload/meta/provenance.json"
    assert json.loads(record.read_text())["commit"] == "unknown"
    (fix,) = [line.strip() for line in done.stderr.splitlines() if "safe.directory" in line]
    assert fix == f"fix:   git config --global --add safe.directory {checkout}"

    refused = as_user(user, checkout, *sqshforge("build", checkouts.TARGET))
    assert refused.returncode == 3
    error, fix = refused.stderr.splitlines()
    assert error.startswith(f"error: {checkout}/build/")
    assert error.endswith(f" belongs to root, and {NAME} cannot write there")
    assert fix.startswith(f"  fix:   sudo chown -R {NAME} {checkout}/build ")
    owner = str(user.home.stat().st_uid)  # root does not know the user's name here
    words = shlex.split(fix.partition("sudo ")[2].partition("  (")[0])
    subprocess.run([owner if word == NAME else word for word in words], check=True)
    # Now it gets as far as checking the arguments.
    after = as_user(user, checkout, *sqshforge("build", checkouts.TARGET, "--engine", "none"))
    assert (after.returncode, "unknown engine 'none'" in after.stderr) == (2, True)


def test_a_user_in_root_s_checkout_is_reported(user: User, checkout: Path) -> None:
    (checkout / "build/bases").unlink()
    (checkout / "build/vendor").unlink()
    (checkout / "build").rmdir()
    for path in (checkout, *checkout.rglob("*")):
        os.lchown(path, 0, 0)
    refused = as_user(user, checkout, *sqshforge("build", checkouts.TARGET))
    assert refused.returncode == 3
    assert refused.stderr.splitlines() == [
        f"error: {checkout} belongs to root, and {NAME} cannot write there",
        f"  fix:   sudo chown -R {NAME} {checkout}  (or use a checkout of your own)",
    ]
    assert as_user(user, checkout, *sqshforge("targets")).returncode == 0  # reading works


def test_a_file_of_the_checkout_that_root_has_written_is_reported(
    user: User, checkout: Path
) -> None:
    """Any file counts, not only those in build/: here it is the lock."""
    locks = checkout / "recipes/locks"
    os.chown(locks / f"{checkouts.TARGET}.lock", 0, 0)
    (locks / f"{checkouts.TARGET}.lock").chmod(0o600)
    refused = as_user(user, checkout, *sqshforge("show", checkouts.TARGET))
    assert refused.returncode == 3, refused.stderr
    assert f"{checkouts.TARGET}.lock belongs to root, and {NAME} cannot" in refused.stderr
    assert "Traceback" not in refused.stderr
