"""Copies on a node that several users share: each user has a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sqshforge.squash import stage as staging
from tests.support import squash_files
from tests.support.ordinary_user import UID, User
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = pytest.mark.processes


@pytest.fixture
def file(user: User) -> Path:
    path = user.place / "a.sqsh"
    path.write_bytes(squash_files.chain(b"a", 2, [b"b"]))
    return path


def words(file: Path, disk: Path) -> list[str]:
    return [sys.executable, "-m", "sqshforge", "stage", str(file), str(disk)]


def shared(user: User, name: str, mode: int, owner: int = 0) -> Path:
    folder = user.place / name
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, owner, owner)
    return folder


def test_two_users_have_a_copy_each(user: User, file: Path) -> None:
    disk = shared(user, "open", 0o1777)
    name = f"{staging.Identity.of(file).name}.sqsh"
    for _ in range(2):
        by_root = subprocess.run(words(file, disk), capture_output=True, text=True, check=True)
        assert by_root.stdout.splitlines()[-1] == str(disk / "0" / name)
        done = user.run(*words(file, disk))
        assert done.returncode == 0, done.stderr
        copy = disk / str(UID) / name
        assert done.stdout.splitlines()[-1] == str(copy)
        assert copy.stat().st_uid == UID and copy.parent.stat().st_mode & 0o777 == 0o700
    assert "there already" in done.stderr


def test_a_folder_of_another_user(user: User, file: Path) -> None:
    disk = shared(user, "closed", 0o755)
    done = user.run(*words(file, disk))
    assert done.returncode == 2
    assert "there can be no folder for this user's copies: Permission denied" in done.stderr
    assert "fix:   name a folder of your own" in done.stderr


@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o1777, UID + 5)])
def test_a_folder_in_which_others_could_replace_the_copies(
    user: User, file: Path, mode: int, owner: int
) -> None:
    disk = shared(user, f"{mode:o}-{owner}", mode, owner)
    done = user.run(*words(file, disk))
    assert done.returncode == 2
    assert f"belongs to uid {owner} and has the mode {mode:04o}" in done.stderr
    assert "fix:   name a folder of your own" in done.stderr


@pytest.mark.parametrize("made", ["folder", "link"])
def test_what_another_user_made_under_this_user_s_name(user: User, file: Path, made: str) -> None:
    disk = shared(user, f"trap-{made}", 0o1777)
    if made == "folder":
        copy = disk / str(UID) / f"{staging.Identity.of(file).name}.sqsh"
        copy.parent.mkdir()
        copy.write_bytes(bytes(file.stat().st_size))
        copy.parent.chmod(0o777)
    else:
        (disk / str(UID)).symlink_to(user.home)
    done = user.run(*words(file, disk))
    assert done.returncode == 2 and "other users could replace the copies" in done.stderr
    assert not done.stdout
