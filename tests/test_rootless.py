"""Work as root of a user namespace, in a child process: results, errors and the caller's rights."""

from __future__ import annotations

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


def test_a_user_builds_and_packs_by_one_command_and_layers_are_not_copied(tmp_path: Path) -> None:
    """Nothing is configured: buildah 1.28 alone would copy each layer."""
    with existing() as user:
        checkout = copy(user.place / "checkout", lines="RUN touch /one\nRUN touch /two")
        for name in ("bases", "vendor"):  # links into this checkout
            (checkout / "build" / name).unlink()
        (checkout / "build/bases").mkdir()
        for base in (ROOT / "build/bases").glob("base-*.tar"):
            (checkout / "build/bases" / base.name).write_bytes(base.read_bytes())
        user.take(checkout)
        for state in ("packed in", "up to date"):
            done = _pack(user, checkout)
            assert done[0] == 0, done[2]
            assert state in done[1]
            assert "copies all layers whole" not in done[2]
        storage = user.home / ".local/share/containers/storage"
        assert len(list((storage / "overlay-layers").iterdir())) > 1
        assert not (storage / "vfs-layers").exists()
        removed = user.run("buildah", "rmi", "--all", "--force", STORAGE_DRIVER="overlay")
        assert removed.returncode == 0, removed.stderr


def _pack(user: User, checkout: Path) -> tuple[int, str, str]:
    """Run `sqshforge pack cpu-mamba` in a checkout of the user's; its code and what it says."""
    argv = [sys.executable, "-m", "sqshforge", "pack", "cpu-mamba", "--profile", "fast"]
    done = user.run(*argv, ENGINE="buildah", PYTHONPATH=str(checkout))
    return done.returncode, done.stdout, done.stderr
