"""Work as root of a user namespace, in a child process: results, errors and the caller's rights."""

from __future__ import annotations

import pwd
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from sqshforge.errors import MissingError
from sqshforge.host import rootless, suggest
from sqshforge.host.programs import Programs
from tests.support import ordinary_user
from tests.support.ordinary_user import existing

pytestmark = [pytest.mark.processes, pytest.mark.root]

CALL = """
import os, sys
from sqshforge.host import rootless
from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs

def work():
    assert os.geteuid() == 0
    if sys.argv[1] == "error":
        raise RequestError("it is wrong", where="here", fix="right it")
    if sys.argv[1] == "bug":
        raise ValueError("a bug")
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    return os.getpid()

try:
    for number in range(2):
        assert rootless.call_as_root(work, "rootfs:.", Programs()) != os.getpid()
        assert os.geteuid() != 0
    print("twice")
except Exception as error:
    print(type(error).__name__, vars(error))
"""

COPY = """
import sys
from pathlib import Path
from sqshforge.build.build import name_of
from sqshforge.engine.buildah import Buildah
from sqshforge.host.programs import Programs

checkout, place = map(Path, sys.argv[1:])
place.mkdir()
Buildah.find(Programs()).copy_out(name_of("cpu-mamba", checkout), "/srv", place)
"""


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("result", "twice\n"),
        ("error", "RequestError {'what': 'it is wrong', 'where': 'here', 'fix': 'right it'}\n"),
        ("bug", "was ended by an error of its own"),
        ("killed", "was ended by signal 9"),
    ],
)
def test_what_the_child_gives_comes_back_and_the_caller_stays_who_it_is(
    what: str, shown: str
) -> None:
    with existing() as user:
        done = user.run(sys.executable, "-c", CALL, what)
    assert shown in done.stdout, done.stderr
    assert ("ValueError: a bug" in done.stderr) == (what == "bug")


class Fedora(Programs):
    """A machine with dnf and buildah, but without the programs that map ids."""

    def which(self, program: str) -> Path | None:
        return Path("/usr/bin", program) if program in ("buildah", "dnf") else None


def test_the_package_that_maps_ids_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_DRIVER", "overlay")
    with pytest.raises(MissingError, match="newuidmap is not installed") as caught:
        rootless._enter_buildahs(Fedora())
    assert caught.value.fix == f"{suggest.sudo()}dnf install shadow-utils"


def test_a_user_without_a_home_has_configured_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not rootless._is_configured({})
    assert rootless._is_configured({"STORAGE_DRIVER": "vfs"})


def test_a_user_builds_and_packs_by_one_command_and_layers_are_not_copied() -> None:
    """Nothing is configured: by itself, buildah 1.28 would copy each layer."""
    with existing() as user:
        checkout = ordinary_user.checkout(user, "RUN touch /srv/one && chown 1000:1000 /srv/one")
        for state in ("packed in", "up to date"):
            done = ordinary_user.pack_target(user, checkout, ENGINE="buildah")
            assert done.returncode == 0, done.stderr
            assert state in done.stdout
            assert "copies all layers whole" not in done.stderr
        storage = user.home / ".local/share/containers/storage"
        assert len(list((storage / "overlay-layers").iterdir())) > 1
        assert not (storage / "vfs-layers").exists()
        copied = user.run(sys.executable, "-c", COPY, checkout, user.home / "copied")
        assert copied.returncode == 0, copied.stderr
        # In the image it has another owner; the user must be able to remove the copy.
        assert (user.home / "copied/one").stat().st_uid == ordinary_user.UID
        removed = user.run("buildah", "rmi", "--all", "--force", STORAGE_DRIVER="overlay")
        assert removed.returncode == 0, removed.stderr


def test_a_user_without_ranges_of_ids_is_reported_before_the_build() -> None:
    with existing(ranges=False) as user:
        done = ordinary_user.pack_target(user, ordinary_user.checkout(user), ENGINE="buildah")
    assert (done.returncode, done.stdout) == (3, "")
    assert "/etc/subuid and /etc/subgid give sqshforge-test-user fewer than 65536" in done.stderr
    assert "usermod --add-subuids 100000-165535 --add-subgids 100000-165535" in done.stderr
    assert len(done.stderr.splitlines()) <= 4
