"""Packing as an ordinary user who may talk to docker: its layers are lent to them, or exported."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.image.docker_mount import exchanged
from tests.support import containers, engines, odd_root, ordinary_user
from tests.support.archives import Image, file, folder, layer, write
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.ordinary_user import (
    DOCKERS,
    UID,
    User,
    by_root,
    command,
    incompressible,
    struck,
    without_namespaces,
)
from tests.support.ordinary_user import context_fixture as context_fixture
from tests.support.ordinary_user import nothing_stays_fixture as nothing_stays_fixture
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = pytest.mark.processes

NOT_LENT = "docker does not mount the image for us: "
CACHED = "all but /sqshforge comes from the cache of bases"


@pytest.fixture
def in_group(docker: str) -> None:
    """The daemon's socket is a group's."""
    socket = Path(docker.removeprefix("unix://"))
    socket.parent.chmod(0o711)
    os.chown(socket, 0, DOCKERS)
    socket.chmod(0o660)


@pytest.fixture
def odd(context: Path, docker: str, in_group: None) -> str:
    """The odd image in the daemon; its address."""
    return f"dockerd://{odd_root.in_docker(context, docker)}"


def test_a_user_in_the_docker_group_builds_and_packs_a_target_by_one_command(
    user: User, docker: str, in_group: None
) -> None:
    checkout = ordinary_user.checkout(user)
    for state in ("packed in", "up to date"):
        tools = f"{engines.CLIENT.parent}:{os.environ['PATH']}"
        done = ordinary_user.pack_target(user, checkout, ENGINE="docker", PATH=tools)
        assert done.returncode == 0, done.stderr
        assert state in done.stdout
        assert NOT_LENT not in done.stderr


def listed(*words: str) -> list[str]:
    return Programs().capture([engines.CLIENT, *words]).split()


def build(context: Path, name: str) -> str:
    argv: list[str | Path] = [engines.CLIENT, "build", "--network", "host", "--tag", name, context]
    Programs().capture(argv, env={"DOCKER_BUILDKIT": "1"})
    return f"dockerd://{name}"


def test_a_user_in_the_docker_group_gets_the_bytes_that_root_gets(
    user: User, odd: str, tmp_path: Path
) -> None:
    before = listed("volume", "ls", "--quiet")
    done = user.pack(odd, "-o", "docker.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert "docker.sqsh: packed in" in done.stdout
    assert NOT_LENT not in done.stderr
    again = user.pack(odd, "-o", "docker.sqsh", "--profile", "fast")
    assert (again.returncode, "docker.sqsh: up to date" in again.stdout) == (0, True), again.stderr
    assert containers.until(lambda: listed("ps", "--all", "--quiet") == [])
    assert listed("volume", "ls", "--quiet") == before

    output = user.home / "docker.sqsh"
    assert output.read_bytes() == by_root(odd, tmp_path / "a.sqsh").read_bytes()
    assert (output.stat().st_uid, output.stat().st_mode & 0o777) == (UID, 0o644)


def test_the_base_of_what_is_lent_is_kept_and_the_user_s_own(user: User, odd: str) -> None:
    assert user.pack(odd, "-o", "a.sqsh", "--profile", "fast").returncode == 0
    again = user.pack(odd, "-o", "b.sqsh", "--profile", "fast")
    assert (again.returncode, CACHED in again.stderr) == (0, True), again.stderr
    kept = list((user.home / "cache").rglob("*"))
    assert kept and {path.stat().st_uid for path in kept} == {UID}


def test_opaque_folders_of_what_is_lent_are_seen(
    user: User, in_group: None, tmp_path: Path
) -> None:
    """Docker marks them in a way that only a mount of root's own knows."""
    layers = [
        layer(folder("d"), file("d/old"), folder("etc")),
        layer(folder("d"), file("d/.wh..wh..opq"), file("d/new"), file("etc/.wh..wh..opq")),
    ]
    write(Image(layers), "docker-archive", tmp_path / "image.tar")
    Programs().capture([engines.CLIENT, "load", "--input", tmp_path / "image.tar"])
    done = user.pack("dockerd://test:latest", "-o", "opaque.sqsh", "--profile", "fast")
    assert (done.returncode, NOT_LENT in done.stderr) == (0, False), done.stderr
    found = odd_root.unpacked(user.home / "opaque.sqsh", tmp_path / "found")
    assert "d/new" in found and "d/old" not in found


@pytest.mark.parametrize("client", ["/usr/bin", "/usr/local/bin"])
def test_an_exported_image_has_the_same_tree(
    client: str, user: User, odd: str, tmp_path: Path
) -> None:
    """With every client that is there: they word their answers differently."""
    path = f"{client}:{os.environ['PATH']}"
    done = user.pack(odd, "-o", "x.sqsh", "--profile", "fast", "--export", "--force", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "the image's layers cannot be seen: no base is kept of it" in done.stderr
    assert (user.home / "x.sqsh").stat().st_uid == UID
    expected = odd_root.unpacked(by_root(odd, tmp_path / "a.sqsh"), tmp_path / "expected")
    assert odd_root.unpacked(user.home / "x.sqsh", tmp_path / "found") == expected
    assert "data/one" in expected and "sqshforge/train.py" in expected


@pytest.mark.parametrize("client", ["/usr/bin", "/usr/local/bin"])
def test_an_image_without_sqshforge_can_be_exported(
    client: str, user: User, in_group: None
) -> None:
    address = build(incompressible(user, Path(client).parent.name), "sqshforge-test-without:1")
    path = f"{client}:{os.environ['PATH']}"
    done = user.pack(address, "-o", "y.sqsh", "--profile", "fast", "--export", "--force", PATH=path)
    assert done.returncode == 0, done.stderr


def test_with_extended_attributes_nothing_is_lent(user: User, odd: str) -> None:
    """In a namespace the kernel shows file capabilities as that namespace's own."""
    done = user.pack(odd, "-o", "xattrs.sqsh", "--profile", "fast", "--xattrs")
    assert done.returncode == 0, done.stderr
    shown = Programs().capture(["unsquashfs", "-d", user.place / "caps", user.home / "xattrs.sqsh"])
    assert "created" in shown
    found = os.getxattr(user.place / "caps/bin/ping", "security.capability")
    assert found == odd_root.CAPABILITY


def test_a_daemon_on_another_machine_lends_nothing(user: User, odd: str) -> None:
    """As from a container: its processes have other numbers than the daemon sees."""
    done = replace(user, apart=True).pack(odd, "-o", "apart.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert f"{NOT_LENT}its daemon runs elsewhere" in done.stderr


def test_a_machine_without_user_namespaces_exports(user: User, odd: str) -> None:
    words = command(odd, "-o", "without.sqsh", "--profile", "fast")
    with without_namespaces(user, *words) as process:
        out, err = process.communicate("\n", timeout=300)
    assert (process.returncode, "without.sqsh: packed in" in out) == (0, True), err
    assert f"{NOT_LENT}unshare cannot make a user namespace" in err


def test_a_daemon_that_refuses_exports(user: User, odd: str) -> None:
    """As one with an authorization plugin does."""
    tools = user.home / "refusing"
    tools.mkdir()
    client = Programs().require("docker")
    (tools / "docker").write_text(
        f'#!/bin/sh\n[ "$1" != run ] || {{ echo "denied by plugin" >&2; exit 125; }}\n'
        f'exec {client} "$@"\n'
    )
    (tools / "docker").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    done = user.pack(odd, "-o", "refused.sqsh", "--profile", "fast", PATH=path)
    assert done.returncode == 0, done.stderr
    assert NOT_LENT in done.stderr and "denied by plugin" in done.stderr


def test_a_client_without_contexts_exports(user: User, odd: str) -> None:
    """As another engine's that goes by docker's name."""
    tools = user.home / "other"
    tools.mkdir()
    client = Programs().require("docker")
    (tools / "docker").write_text(f'#!/bin/sh\n[ "$1" != context ] && exec {client} "$@"\n')
    (tools / "docker").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    done = user.pack(odd, "-o", "other.sqsh", "--profile", "fast", PATH=path)
    assert done.returncode == 0, done.stderr
    assert f"{NOT_LENT}its daemon runs elsewhere" in done.stderr


def test_what_an_image_has_in_its_volumes_is_not_copied(
    user: User, in_group: None, docker: str
) -> None:
    """Docker fills a volume for each new container, which may be gigabytes."""
    context = incompressible(user, "volume")
    (context / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /data/\nVOLUME /data\n")
    address = build(context, "sqshforge-test-volume:1")
    argv = command(address, "-o", "volume.sqsh", "--profile", "archive", "--jobs", "1")
    with subprocess.Popen(
        user.argv(*argv), env=user.environment({}), cwd=user.home, stderr=subprocess.PIPE
    ) as process:
        assert containers.until(lambda: list(user.home.glob(".volume.sqsh*.tmp")))
        during = listed("volume", "ls", "--quiet")
        _, err = process.communicate(timeout=300)
    assert (process.returncode, NOT_LENT in err.decode(), during) == (0, False, [])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_packer_of_what_is_lent_that_gets_a_signal(
    how: signal.Signals, user: User, in_group: None
) -> None:
    address = build(incompressible(user, how.name), "sqshforge-test-slow:1")
    struck(user, address, how)
    assert containers.until(lambda: listed("ps", "--all", "--quiet") == [])


def test_a_user_who_may_not_talk_to_docker_is_told_so(user: User, odd: str) -> None:
    Path(os.environ["DOCKER_HOST"].removeprefix("unix://")).chmod(0o600)
    done = user.pack(odd, "-o", "x.sqsh")
    assert (done.returncode, done.stdout) == (3, "")
    assert "docker does not answer" in done.stderr and "ermission denied" in done.stderr


@pytest.mark.parametrize("own", [1, 1000, 2_000_000_000])
def test_in_the_namespace_of_a_loan_every_id_has_a_place(own: int) -> None:
    """Root's and the user's own are exchanged, all others stay."""
    ranges = [tuple(map(int, line.split())) for line in exchanged(own).splitlines()]

    def outside(inside: int) -> int:
        (found,) = (out + inside - first for first, out, n in ranges if first <= inside < first + n)
        return found

    assert (outside(0), outside(own)) == (own, 0)
    for other in {2, 999, 65534, own + 1, 0xFFFFFFFE} - {own}:
        assert outside(other) == other
    assert sum(count for _, _, count in ranges) == 0xFFFFFFFF
