"""Work as root of a user namespace, in a child process: results, errors and the caller's rights."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.checkouts import copy
from tests.conftest import ROOT
from tests.users import User, existing

CALL = """
import os, sys
from sqshforge import rootless
from sqshforge.errors import RequestError
from sqshforge.programs import Programs

def work():
    assert os.geteuid() == 0
    if sys.argv[1] == "error":
        raise RequestError("it is wrong", where="here", mend="right it")
    if sys.argv[1] == "bug":
        raise ValueError("a bug")
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    return os.getpid()

try:
    for number in range(2):
        assert rootless.call(work, "rootfs:.", Programs()) != os.getpid()
        assert os.geteuid() != 0
    print("twice")
except Exception as error:
    print(type(error).__name__, vars(error))
"""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("result", "twice\n"),
        ("error", "RequestError {'what': 'it is wrong', 'where': 'here', 'mend': 'right it'}\n"),
        ("bug", "was ended by an error of its own"),
        ("killed", "was ended by signal 9"),
    ],
)
def test_what_the_child_gives_comes_back_and_the_caller_stays_who_it_is(
    what: str, told: str
) -> None:
    with existing() as user:
        done = user.run(sys.executable, "-c", CALL, what)
    assert told in done.stdout, done.stderr
    assert ("ValueError: a bug" in done.stderr) == (what == "bug")


def test_a_user_builds_and_packs_by_one_command_and_layers_are_not_copied() -> None:
    """Nothing is configured: buildah 1.28 alone would copy each layer."""
    with existing() as user:
        checkout = _checkout(user)
        for state in ("packed in", "up to date"):
            code, out, err = _pack(user, checkout)
            assert code == 0, err
            assert state in out
            assert "copies all layers whole" not in err
        storage = user.home / ".local/share/containers/storage"
        assert len(list((storage / "overlay-layers").iterdir())) > 1
        assert not (storage / "vfs-layers").exists()
        removed = user.run("buildah", "rmi", "--all", "--force", STORAGE_DRIVER="overlay")
        assert removed.returncode == 0, removed.stderr


def test_a_user_without_ranges_of_ids_is_told_before_the_build() -> None:
    with existing(ranges=False) as user:
        code, out, err = _pack(user, _checkout(user))
    assert (code, out) == (3, "")
    assert "/etc/subuid and /etc/subgid give sqshforge-test-user fewer than 65536" in err
    assert "usermod --add-subuids 100000-165535 --add-subgids 100000-165535" in err
    assert len(err.splitlines()) <= 4


def _checkout(user: User) -> Path:
    """A checkout of the user's, with a small image to build, and the base that is there."""
    checkout = copy(user.place / "checkout", lines="RUN touch /one\nRUN touch /two")
    for name in ("bases", "vendor"):  # links into this checkout
        (checkout / "build" / name).unlink()
    (checkout / "build/bases").mkdir()
    for base in (ROOT / "build/bases").glob("base-*.tar"):
        shutil.copy(base, checkout / "build/bases")
    return user.take(checkout)


def _pack(user: User, checkout: Path) -> tuple[int, str, str]:
    """Run `sqshforge pack cpu-mamba` in a checkout of the user's; its code and what it says."""
    argv = [sys.executable, "-m", "sqshforge", "pack", "cpu-mamba", "--profile", "fast"]
    done = user.run(*argv, ENGINE="buildah", PYTHONPATH=str(checkout))
    return done.returncode, done.stdout, done.stderr
