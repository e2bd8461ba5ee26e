"""Packing into a folder that others use: other outputs beside it, and other users."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import containers, odd_root
from tests.support.ordinary_user import UID, User, command
from tests.support.ordinary_user import user_fixture as user_fixture
from tests.support.packing import run, visible

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def tree(user: User) -> Path:
    return user.take(odd_root.make(user.home / "tree"))


@pytest.fixture
def shared(user: User, tmp_path: Path) -> Iterator[Path]:
    """A folder that all may write to."""
    folder = user.place / f"shared-{tmp_path.name}"
    folder.mkdir()
    folder.chmod(0o2777)
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def test_what_packers_of_other_outputs_work_on_stays(tmp_path: Path) -> None:
    (tmp_path / "tree/etc").mkdir(parents=True)
    left = {".img.5.tmp", ".img.json.5.tmp", ".img.5.tmp.work"}
    others = {".img.v2.sqsh.7.tmp", ".img.v2.sqsh.7.tmp.work", ".img.old.7.tmp", ".img.x.tmp"}
    for name in left | others:
        (tmp_path / name).mkdir() if name.endswith("work") else (tmp_path / name).touch()
    done = run(f"rootfs:{tmp_path}/tree", "-o", tmp_path / "img", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert visible(tmp_path) == {"tree", "img", "img.json", *others}


@pytest.mark.parametrize("mode", [0o2777, 0o3777])
def test_what_another_user_s_killed_packer_left_is_not_in_the_way(
    mode: int, user: User, tree: Path, shared: Path
) -> None:
    shared.chmod(mode)
    for name in (".team.sqsh.lock", ".team.sqsh.9.tmp"):
        (shared / name).touch(0o644)
    (shared / ".team.sqsh.9.tmp.work/mount").mkdir(parents=True)
    done = user.pack(f"rootfs:{tree}", "-o", shared / "team.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert (shared / "team.sqsh").stat().st_uid == UID


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_of_two_users_one_waits(umask: int, user: User, tree: Path, shared: Path) -> None:
    """The lock that one of them creates can be opened by the other."""
    tools, seen, lock = shared / "bin", shared / "seen", shared / ".a.sqsh.lock"
    tools.mkdir()
    tool = tools / "mksquashfs"
    waits = f'[ "$1" = -version ] || until [ -e {seen} ]; do sleep 0.05; done'
    tool.write_text(f'#!/bin/sh\n{waits}\nexec {shutil.which("mksquashfs")} "$@"\n')
    for one in (tools, tool):
        one.chmod(0o755)
    before = os.umask(umask)
    try:
        first = subprocess.Popen(
            user.argv(*command(f"rootfs:{tree}", "-o", shared / "a.sqsh")),
            env=user.environment({"PATH": f"{tools}:{os.environ['PATH']}"}),
        )
        is_open = containers.until(lambda: lock.exists() and lock.stat().st_mode & 0o666 == 0o666)
    finally:
        os.umask(before)
        seen.touch()
    assert first.wait(300) == 0 and is_open
    lock.touch(0o644)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = (f"rootfs:{tree}", "-o", shared / "a.sqsh")
        with subprocess.Popen(
            user.argv(*command(*words)),
            env=user.environment({}),
            stderr=subprocess.PIPE,
            text=True,
        ) as second:
            assert second.stderr is not None
            said = second.stderr.readline()
            fcntl.flock(held, fcntl.LOCK_UN)
            rest = second.stderr.read()
    assert "waiting for another packer of" in said, said + rest
    assert second.returncode == 0, rest


def test_another_user_s_lock_that_is_closed(user: User, tree: Path, shared: Path) -> None:
    lock = shared / ".a.sqsh.lock"
    lock.touch()
    lock.chmod(0o600)
    done = user.pack(f"rootfs:{tree}", "-o", shared / "a.sqsh")
    assert done.returncode == 1
    assert "error: a lock of another user (" in done.stderr
    assert f"where: {lock}\n" in done.stderr
    assert f"as that user: rm -r {lock}" in done.stderr
