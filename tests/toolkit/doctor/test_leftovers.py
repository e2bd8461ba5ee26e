"""`doctor` and `cache prune` report what killed commands left, with the command to remove it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sqshforge.host import temporary
from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.project import Project
from tests.support.command_line import SCRIPT, sqshforge
from tests.support.engines import CLIENT
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import storage_fixture as storage_fixture
from tests.support.ordinary_user import AS_USER, User
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = pytest.mark.processes

COMMANDS = [["doctor"], ["cache", "prune"]]
WHAT = "left by a command that was killed"


def ended(kind: str) -> str:
    """Return a name that was given by a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return temporary.name(kind).replace(f".{os.getpid()}.", f".{process.pid}.")


@pytest.fixture
def above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder for temporary files, and an empty cache."""
    place = tmp_path / "a b"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("SQSHFORGE_CACHE", str(tmp_path / "cache"))
    return place


def said(command: list[str]) -> list[str]:
    """Return a command's lines about leftovers, each followed by the one that removes it."""
    done = sqshforge(*command, env={"COLUMNS": "1000"})
    assert done.code in (0, 3) and "Traceback" not in done.err, done.err
    lines = done.out.splitlines()
    assert lines[-1].startswith("next: ") or done.code == 3
    found = [index for index, line in enumerate(lines) if WHAT in line]
    return [line.strip() for index in found for line in lines[index : index + 2]]


def carry_out(fix: str) -> None:
    subprocess.run(["sh", "-c", fix.partition(": ")[2]], check=True)


@pytest.mark.usefixtures("no_docker")
def test_where_nothing_is_left_the_doctor_says_so(above: Path, storage: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(above))
        with temporary.folder("apt"):  # it is in use
            assert said(["doctor"])[0] == f"ok      {WHAT}: nothing"
            assert said(["cache", "prune"]) == []


@pytest.mark.usefixtures("no_docker")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["a b", "cache/pulled"])
def test_a_folder_is_named(
    where: str, command: list[str], above: Path, tmp_path: Path, storage: None
) -> None:
    place = tmp_path / where / ended("apt")
    (place / "lists").mkdir(parents=True)
    line, fix = said(command)
    assert line.endswith(f"{WHAT}: {place}")
    if os.geteuid() == 0:
        carry_out(fix)
        assert not place.exists()


@pytest.mark.root
@pytest.mark.usefixtures("no_docker")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_mounted_is_named(command: list[str], above: Path, storage: None) -> None:
    place = above / ended("bootstrap")
    for name in ("proc", "dev"):
        (place / name).mkdir(parents=True)
        Programs().capture(["mount", "-t", "tmpfs", "tmpfs", place / name])
    try:
        line, fix = said(command)
        assert line.endswith(f"{WHAT}: {place}, with 2 mounts in it")
        carry_out(fix)
        assert not place.exists()
    finally:
        for mount in temporary.mounts(place):
            Programs().attempt(["umount", "--lazy", mount])


@pytest.mark.usefixtures("no_docker")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_container_of_buildah_is_named(command: list[str], above: Path, storage: None) -> None:
    name, running = ended("pack"), temporary.name("pack")
    for one in (name, running, f"other-{name}"):
        Programs().capture(["buildah", "from", "--name", one, "scratch"])
    try:
        line, fix = said(command)
        assert line.endswith(f"{WHAT}: {name} of buildah")
        carry_out(fix)
        assert name not in Programs().capture(["buildah", "containers"]).split()
    finally:
        Programs().attempt(["buildah", "rm", "--all"])


@pytest.mark.usefixtures("no_docker")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_container_of_a_killed_build_is_named(
    command: list[str], above: Path, tmp_path: Path, storage: None
) -> None:
    """Containers of running builds, in any checkout, and those that a user made are not named."""
    Programs().capture(["buildah", "from", "scratch"])
    killed, running = (
        begun(Project(tmp_path / one / "checkout"), "cpu-mamba") for one in ("killed", "running")
    )
    lock = Project(tmp_path / "running/checkout").build_lock("cpu-mamba")
    try:
        with exclusive(lock, "", Reporter(quiet=True)):
            line, fix = said(command)
        target = tmp_path / "killed/checkout/build/cpu-mamba"
        assert line.endswith(f"{WHAT}: a container of buildah, of the build of {target}")
        carry_out(fix)
        assert killed not in listed() and running in listed() and len(listed()) == 2
    finally:
        Programs().attempt(["buildah", "rm", "--all"])


def begun(project: Project, target: str) -> str:
    """Return the working container left by a build that ended in the middle."""
    secrets = project.secrets(target)
    secrets.mkdir(parents=True)
    words: list[str | Path] = [
        "buildah",
        "build",
        "--isolation",
        "chroot",
        "--layers",
        "--rm=false",
    ]
    for name in ("apt", "ca", "pip"):
        (secrets / name).touch()
        words += ["--secret", f"id={name},src={secrets / name}"]
    before = set(listed())
    Programs().attempt([*words, "--file", "-", secrets], stdin=b"FROM scratch\nCOPY ca /\n")
    (made,) = set(listed()) - before
    return made


def listed() -> list[str]:
    words = ["buildah", "containers", "--notruncate", "--format", "{{.ContainerID}}"]
    return Programs().capture(words).split()


@pytest.mark.root
@pytest.mark.parametrize("command", COMMANDS)
def test_a_container_of_docker_is_named(
    command: list[str], above: Path, storage: None, docker: str
) -> None:
    name = ended("pack")
    tar = subprocess.run(["tar", "-c", "-T", "/dev/null"], check=True, stdout=subprocess.PIPE)
    Programs().capture([CLIENT, "import", "-", "sqshforge-test-empty"], stdin=tar.stdout)
    Programs().capture([CLIENT, "create", "--name", name, "sqshforge-test-empty", "/none"])
    line, fix = said(command)
    assert line.endswith(f"{WHAT}: {name} of docker")
    carry_out(fix)
    assert Programs().capture([CLIENT, "ps", "--all", "--quiet"]) == ""


# Ways in which a running process is invisible in /proc: another namespace, or hidden.
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
HIDDEN = ["sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh", *AS_USER]


@pytest.mark.root
@pytest.mark.parametrize("way", [NAMESPACE, HIDDEN], ids=["another namespace", "hidepid"])
def test_what_runs_out_of_sight_is_not_named(way: list[str], user: User) -> None:
    """The only container that docker has here belongs to this very process."""
    docker = user.home / "bin/docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text(f"#!/bin/sh\necho {temporary.name('pack')}\n")
    docker.chmod(0o755)
    done = subprocess.run(
        [*user.enter(), *way, SCRIPT, "cache", "prune"],
        env=user.environment({"PATH": f"{docker.parent}:{os.environ['PATH']}"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert WHAT not in done.stdout
