"""The doctor as an ordinary user, in a clone with nothing set up; its checks are real."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import checkouts
from tests.support.ordinary_user import AS_USER, NAME, User, existing, without_namespaces
from tests.support.ordinary_user import nothing_stays_fixture as nothing_stays_fixture
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_docker")]


@pytest.fixture(scope="module")
def clone(user: User) -> Path:
    return user.take(checkouts.bare(user.home / "clone"))


def examined(user: User, clone: Path, before: str = ":", **variables: str) -> tuple[int, list[str]]:
    """Return the doctor's exit code and lines, after root has changed the machine that it sees."""
    words = [*user.enter(), "sh", "-c", f'{before}; exec "$@"', "sh", *AS_USER]
    done = subprocess.run(
        [*words, str(clone / "setup.sh"), "doctor"],
        env=user.environment({"PYTHONPATH": "", **variables}),
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def shown(lines: list[str], name: str) -> tuple[str, str]:
    """Return a finding's line, and the one with its fix."""
    at = next(index for index, line in enumerate(lines) if line[8:].startswith(name))
    return lines[at], lines[at + 1].strip()


def test_all_is_there_and_slow_storage_is_reported_with_a_setting_that_fixes_it(
    user: User, clone: Path
) -> None:
    code, lines = examined(user, clone)
    assert code == 0, "\n".join(lines)
    assert lines[-2:] == ["all there", "next: make quickstart"]
    line, fix = shown(lines, "storage of buildah")
    if "vfs" in line:  # buildah's own default before 1.29
        assert line.startswith("-") and "every layer is copied whole" in line
        user.run("sh", "-c", fix.partition(": ")[2])
        code, lines = examined(user, clone)
        line, _ = shown(lines, "storage of buildah")
    assert line.startswith("ok") and "the kernel's overlay" in line, line
    containers_of_it = user.home / ".local/share/containers/storage"
    assert not list(containers_of_it.glob(".sqshforge*"))  # nothing is left of its trial


def test_a_closed_fuse(user: User, clone: Path) -> None:
    code, lines = examined(user, clone, "chmod 0600 /dev/fuse")
    line, fix = shown(lines, "/dev/fuse")
    assert code == 3 and line.startswith("MISSING")
    assert f"not open to {NAME}: its mode is 0600" in line
    assert fix == "fix: sudo modprobe fuse && sudo chmod 0666 /dev/fuse"


@pytest.mark.parametrize("home", ["not-there", "closed"])
def test_a_home_that_cannot_be_written(home: str, as_root: None, user: User, clone: Path) -> None:
    """The usual place of logins belongs to root, as after root has used buildah."""
    Path("/run/containers").mkdir(mode=0o700, exist_ok=True)
    (user.place / "closed").mkdir(mode=0o700, exist_ok=True)
    temporary = user.home / "buildahs"  # where buildah keeps its other run-time files
    temporary.mkdir(exist_ok=True)
    places = {"HOME": str(user.place / home), "TMPDIR": str(user.take(temporary))}
    code, lines = examined(user, clone, XDG_RUNTIME_DIR="", SQSHFORGE_CACHE="", **places)
    line, fix = shown(lines, "storage of buildah")
    assert code == 3 and line.startswith("MISSING")
    if home == "closed":
        assert str(user.place / home) in line
        assert fix == "fix: export HOME=DIR, a folder that this user may write to"
        line, _ = shown(lines, "left by a command")
        assert "cannot be seen: " in line


def test_no_range_of_ids(clone: Path) -> None:
    with existing(ranges=False) as user:
        code, lines = examined(user, user.take(checkouts.bare(user.home / "clone")))
    line, fix = shown(lines, "ranges of ids")
    assert code == 3 and line.startswith("MISSING")
    assert f"/etc/subuid and /etc/subgid give {NAME} fewer than 65536" in line
    assert fix == (
        f"fix: sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {NAME}"
    )


def test_no_user_namespaces(user: User, clone: Path) -> None:
    with without_namespaces(user, str(clone / "setup.sh"), "doctor") as process:
        out, _ = process.communicate("\n", timeout=300)
    line, fix = shown(out.splitlines(), "user namespaces")
    assert process.returncode == 3 and line.startswith("MISSING"), out
    assert "user.max_user_namespaces is 0" in line
    assert fix == "fix: sudo sysctl user.max_user_namespaces=10000"
