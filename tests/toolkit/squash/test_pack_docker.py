"""Packing from docker if its layers cannot be read: as an ordinary user, or from elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.programs import Programs
from tests.support import containers, docker_api, engines, odd_root, ordinary_user
from tests.support.archives import Image, file, folder, layer, sha256, write
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.ordinary_user import DOCKERS, UID, User, by_root, command, incompressible, struck
from tests.support.ordinary_user import context_fixture as context_fixture
from tests.support.ordinary_user import nothing_stays_fixture as nothing_stays_fixture
from tests.support.ordinary_user import user_fixture as user_fixture

pytestmark = pytest.mark.processes

CACHED = "all but /sqshforge comes from the cache of bases"
FAST = ("--profile", "fast")


@pytest.fixture
def in_group(docker: str) -> None:
    """Let the daemon's socket belong to a group."""
    socket = Path(docker.removeprefix("unix://"))
    socket.parent.chmod(0o711)
    os.chown(socket, 0, DOCKERS)
    socket.chmod(0o660)


@pytest.fixture
def odd(context: Path, docker: str, in_group: None) -> str:
    """The address of the odd image in the daemon."""
    return f"dockerd://{odd_root.in_docker(context, docker)}"


@pytest.fixture
def fresh(user: User) -> User:
    """The user with a cache only for this test."""
    cache = user.home / f"cache-{time.monotonic_ns()}"
    cache.mkdir()
    user.take(cache)
    return replace(user, own_cache=cache)


def listed(*words: str) -> list[str]:
    return Programs().capture([engines.CLIENT, *words]).split()


@contextmanager
def watched() -> Iterator[list[str]]:
    """Record what the daemon did in the block, such as `container create`; filled at its end."""
    done: list[str] = []
    since = time.time()
    yield done
    argv: list[str | Path] = [engines.CLIENT, "events", "--format", "{{.Type}} {{.Action}}"]
    argv += ["--since", f"{since:.9f}", "--until", f"{time.time():.9f}"]
    done += Programs().capture(argv).splitlines()


def build(context: Path, name: str) -> str:
    argv: list[str | Path] = [engines.CLIENT, "build", "--network", "host", "--tag", name, context]
    Programs().capture(argv, env={"DOCKER_BUILDKIT": "1"})
    return f"dockerd://{name}"


def edit(context: Path, text: str) -> None:
    (context / "code/train.py").write_text(text)


def load(image: Image, place: Path) -> str:
    """Load an image made byte by byte into the daemon."""
    write(image, "docker-archive", place)
    said = Programs().capture([engines.CLIENT, "load", "--input", place])
    return f"dockerd://{said.split()[-1]}"


def with_history(*instructions: str) -> Any:
    """Return a change of an image's config that sets the history of its layers."""
    steps = [{"created_by": one, "created": "2024-02-29T12:00:00Z"} for one in instructions]
    return lambda config: {**config, "history": steps}


def test_a_user_in_the_docker_group_builds_and_packs_a_target_by_one_command(
    user: User, docker: str, in_group: None
) -> None:
    checkout = ordinary_user.checkout(user)
    tools = f"{engines.CLIENT.parent}:{os.environ['PATH']}"
    for state in ("packed in", "up to date", "an edit"):
        if state == "an edit":
            with (checkout / "training/cli.py").open("a") as file:
                file.write("# edited\n")
        with watched() as done_by_docker:
            done = ordinary_user.pack_target(user, checkout, ENGINE="docker", PATH=tools)
        assert done.returncode == 0, done.stderr
        assert ("up to date" in done.stdout) == (state == "up to date")
        # After an edit, nothing but /sqshforge is read.
        assert done_by_docker.count("image save") == (state == "packed in")


def test_a_user_in_the_docker_group_gets_the_bytes_that_root_gets(
    fresh: User, odd: str, tmp_path: Path
) -> None:
    volumes = listed("volume", "ls", "--quiet")
    with watched() as done_by_docker:
        done = fresh.pack(odd, "-o", "docker.sqsh", *FAST)
        assert done.returncode == 0, done.stderr
        assert "docker.sqsh: packed in" in done.stdout
        again = fresh.pack(odd, "-o", "docker.sqsh", *FAST)
        assert "docker.sqsh: up to date" in again.stdout, again.stderr
    assert done_by_docker == ["image save"]
    assert listed("ps", "--all", "--quiet") == []
    assert listed("volume", "ls", "--quiet") == volumes

    output = fresh.home / "docker.sqsh"
    assert output.read_bytes() == by_root(odd, tmp_path / "a.sqsh").read_bytes()
    found = odd_root.unpacked(output, tmp_path / "found")
    assert "data/one" in found and "sqshforge/train.py" in found
    assert (output.stat().st_uid, output.stat().st_mode & 0o777) == (UID, 0o644)
    kept = list(fresh.cache.rglob("*"))
    assert kept and {path.stat().st_uid for path in kept} == {UID}


def test_after_an_edit_a_user_gets_no_more_than_sqshforge_from_docker(
    fresh: User, odd: str, context: Path, docker: str, tmp_path: Path
) -> None:
    """No volume is filled either: the image has two."""
    assert fresh.pack(odd, "-o", "edit.sqsh", *FAST).returncode == 0
    edit(context, "print('edited')\n")
    odd_root.in_docker(context, docker)
    with watched() as done_by_docker:
        done = fresh.pack(odd, "-o", "edit.sqsh", *FAST)
    assert (done.returncode, CACHED in done.stderr) == (0, True), done.stderr
    assert set(done_by_docker) == {
        "container create",
        "container archive-path",
        "container destroy",
    }
    cold = fresh.pack(odd, "-o", "cold.sqsh", *FAST, "--no-cache")
    assert cold.returncode == 0, cold.stderr
    output = fresh.home / "edit.sqsh"
    assert output.read_bytes() == (fresh.home / "cold.sqsh").read_bytes()
    shown = Programs().capture(["unsquashfs", "-cat", output, "sqshforge/train.py"])
    assert shown == "print('edited')\n"


def test_after_an_edit_that_docker_does_not_let_a_user_copy_the_image_is_saved(
    fresh: User, odd: str, context: Path, docker: str
) -> None:
    """For example, /sqshforge has become too large to be unpacked for a moment."""
    assert fresh.pack(odd, "-o", "large.sqsh", *FAST).returncode == 0
    (context / "code/large").write_bytes(bytes(40 << 20))
    try:
        odd_root.in_docker(context, docker)
        with watched() as done_by_docker:
            done = fresh.pack(odd, "-o", "large.sqsh", *FAST)
    finally:
        (context / "code/large").unlink()
    assert (done.returncode, CACHED in done.stderr) == (0, False), done.stderr
    assert "image save" in done_by_docker and "container start" not in done_by_docker
    assert listed("ps", "--all", "--quiet") == []


BASE = layer(folder("etc"), file("etc/passwd", b"base"), folder("sqshforge"), file("sqshforge/a"))
CODE = layer(folder("sqshforge"), file("sqshforge/b", b"code"))
MORE_THAN_CODE = layer(file("etc/passwd", b"other"), folder("sqshforge"), file("sqshforge/b"))
HONEST = with_history("ADD rootfs.tar / # buildkit", "COPY code /sqshforge/ # buildkit")


@pytest.mark.parametrize("liar_first", [True, False])
def test_a_history_that_lies_spoils_no_base(
    liar_first: bool, fresh: User, in_group: None, tmp_path: Path
) -> None:
    liar = load(Image([BASE, MORE_THAN_CODE], tag="liar", config=HONEST), tmp_path / "liar.tar")
    honest = load(Image([BASE, CODE], tag="honest", config=HONEST), tmp_path / "honest.tar")
    order = [liar, honest] if liar_first else [honest, liar]
    for address in order:
        done = fresh.pack(address, "-o", "x.sqsh", *FAST, "--force")
        assert done.returncode == 0, done.stderr
        if address == order[0] or liar_first:
            assert CACHED not in done.stderr
    done = fresh.pack(honest, "-o", "honest.sqsh", *FAST, "--force")
    assert (done.returncode, CACHED in done.stderr) == (0, True), done.stderr
    cold = fresh.pack(honest, "-o", "cold.sqsh", *FAST, "--no-cache")
    assert cold.returncode == 0, cold.stderr
    output = fresh.home / "honest.sqsh"
    assert output.read_bytes() == (fresh.home / "cold.sqsh").read_bytes()
    assert Programs().capture(["unsquashfs", "-cat", output, "etc/passwd"]) == "base"


def test_a_run_that_speaks_of_sqshforge_is_not_taken_to_change_nothing_else(
    fresh: User, in_group: None, tmp_path: Path
) -> None:
    """Its layer is inspected, and rightly so."""
    does_more = with_history("ADD rootfs.tar / # buildkit", "RUN cp -r /x /sqshforge && useradd b")
    base = load(Image([BASE, CODE], tag="base", config=HONEST), tmp_path / "base.tar")
    more = load(Image([BASE, MORE_THAN_CODE], tag="more", config=does_more), tmp_path / "more.tar")
    for address in (base, more):
        done = fresh.pack(address, "-o", "run.sqsh", *FAST)
        assert (done.returncode, CACHED in done.stderr) == (0, False), done.stderr
    shown = Programs().capture(["unsquashfs", "-cat", fresh.home / "run.sqsh", "etc/passwd"])
    assert shown == "other"


def test_opaque_folders_are_seen(user: User, in_group: None, tmp_path: Path) -> None:
    layers = [
        layer(folder("d"), file("d/old"), folder("etc")),
        layer(folder("d"), file("d/.wh..wh..opq"), file("d/new"), file("etc/.wh..wh..opq")),
    ]
    address = load(Image(layers), tmp_path / "image.tar")
    done = user.pack(address, "-o", "opaque.sqsh", *FAST)
    assert done.returncode == 0, done.stderr
    found = odd_root.unpacked(user.home / "opaque.sqsh", tmp_path / "found")
    assert "d/new" in found and "d/old" not in found


def test_an_image_without_sqshforge_is_packed_too(user: User, in_group: None) -> None:
    address = build(incompressible(user, "without"), "sqshforge-test-without:1")
    done = user.pack(address, "-o", "y.sqsh", *FAST)
    assert done.returncode == 0, done.stderr


def test_extended_attributes_are_kept_on_request(user: User, odd: str) -> None:
    done = user.pack(odd, "-o", "xattrs.sqsh", *FAST, "--xattrs")
    assert done.returncode == 0, done.stderr
    shown = Programs().capture(["unsquashfs", "-d", user.place / "caps", user.home / "xattrs.sqsh"])
    assert "created" in shown
    found = os.getxattr(user.place / "caps/bin/ping", "security.capability")
    assert found == odd_root.CAPABILITY


def test_root_packs_from_a_daemon_whose_layers_it_does_not_see(
    odd: str, docker: str, tmp_path: Path
) -> None:
    """The daemon may be on another machine."""
    layers = Path(docker.removeprefix("unix://")).parent / "d/overlay2"
    hiding = f'mount -t tmpfs none {layers} && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", hiding, "sh"]
    argv += command(odd, "-o", tmp_path / "apart.sqsh", *FAST, "--no-cache")
    with watched() as done_by_docker:
        Programs().capture(argv)
    assert done_by_docker == ["image save"]
    expected = by_root(odd, tmp_path / "a.sqsh").read_bytes()
    assert (tmp_path / "apart.sqsh").read_bytes() == expected


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_packer_that_gets_a_signal(how: signal.Signals, user: User, in_group: None) -> None:
    address = build(incompressible(user, how.name), "sqshforge-test-slow:1")
    struck(user, address, how)
    assert listed("ps", "--all", "--quiet") == []


def test_a_packer_that_is_killed_while_docker_saves(fresh: User, in_group: None) -> None:
    """What it had of the image is removed with the next pack of the file."""
    address = build(incompressible(fresh, "saving"), "sqshforge-test-saving:1")
    place = fresh.home / "killed"
    place.mkdir()
    fresh.take(place)
    argv = fresh.argv(*command(address, "-o", place / "a.sqsh", *FAST))
    with subprocess.Popen(argv, env=fresh.environment({}), stderr=subprocess.DEVNULL) as process:
        assert containers.until(lambda: list(place.glob(".*.work/image.tar")))
        process.kill()
    assert not (place / "a.sqsh").exists()
    done = fresh.pack(address, "-o", place / "a.sqsh", *FAST)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in place.iterdir()} == {"a.sqsh", "a.sqsh.json"}


def failed(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """Return the exit code and the error of a pack that wrote nothing."""
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4, done.stderr
    return done.returncode, done.stderr


def test_a_user_who_may_not_talk_to_docker_gets_one_error(
    user: User, odd: str, docker: str
) -> None:
    Path(docker.removeprefix("unix://")).chmod(0o600)
    code, said = failed(user.pack(odd, "-o", "x.sqsh"))
    assert code == 3
    assert "no docker daemon answers: permission denied" in said and docker in said
    assert "usermod --append --groups docker" in said


@pytest.mark.parametrize(
    ("host", "code", "shown"),
    [
        ("unix:///nowhere/docker.sock", 3, "no docker daemon answers: no such file or directory"),
        ("tcp://127.0.0.1:1", 3, "no docker daemon answers: connection refused"),
        ("unix://SOCKET", 3, "no docker daemon answers: connection refused"),
        ("http//wrong", 2, "DOCKER_HOST is not a valid address"),
        ("tcp://host:port", 2, "DOCKER_HOST is not a valid address"),
        ("ftp://host:1", 2, "DOCKER_HOST is not a valid address"),
    ],
)
def test_a_daemon_that_is_not_there_is_one_clear_error(
    host: str, code: int, shown: str, user: User, tmp_path: Path
) -> None:
    if "SOCKET" in host:  # the address of a daemon that has ended
        script = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
        host = f"unix://{user.home}/s"
        assert user.run(sys.executable, "-c", script, user.home / "s").returncode == 0
    found, said = failed(user.pack("dockerd://x", "-o", "x.sqsh", DOCKER_HOST=host))
    assert (found, shown in said) == (code, True), said
    assert host in said and "DOCKER_HOST" in said


@pytest.fixture
def settings(user: User, docker: str, in_group: None) -> Iterator[Path]:
    """A folder with the docker client's settings, with a context for the daemon."""
    place = user.home / "settings"
    place.mkdir(exist_ok=True)
    user.take(place)
    words = ["context", "create", "private", "--docker", f"host={docker}"]
    made = user.run(engines.CLIENT, *words, DOCKER_CONFIG=str(place))
    assert made.returncode == 0 or "already exists" in made.stderr, made.stderr
    yield place
    (place / "config.json").unlink(missing_ok=True)


def test_the_daemon_is_that_of_the_client_s_context(user: User, odd: str, settings: Path) -> None:
    of_nobody = {"DOCKER_HOST": "", "DOCKER_CONFIG": str(settings)}
    done = user.pack(odd, "-o", "named.sqsh", *FAST, **of_nobody, DOCKER_CONTEXT="private")
    assert done.returncode == 0, done.stderr
    (settings / "config.json").write_text(json.dumps({"currentContext": "private"}))
    done = user.pack(odd, "-o", "current.sqsh", *FAST, **of_nobody)
    assert done.returncode == 0, done.stderr


def test_a_context_that_there_is_none_of(user: User, settings: Path) -> None:
    of_nobody = {"DOCKER_HOST": "", "DOCKER_CONFIG": str(settings), "DOCKER_CONTEXT": "none"}
    code, said = failed(user.pack("dockerd://x", "-o", "x.sqsh", **of_nobody))
    assert (code, "docker has no context 'none'" in said) == (2, True), said


def test_a_daemon_is_reached_by_ssh_as_the_client_does_it(
    user: User, odd: str, docker: str
) -> None:
    """A stand-in for the program ssh treats this machine as the other one."""
    tools = user.home / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(
        f'#!/bin/sh\necho "$@" > {tools}/asked\nwhile [ "$1" != -- ]; do shift; done\nshift 2\n'
        f"DOCKER_HOST={docker} exec {engines.CLIENT.parent}/$*\n"
    )
    (tools / "ssh").chmod(0o755)
    user.take(tools)
    path = f"{tools}:{os.environ['PATH']}"
    done = user.pack(odd, "-o", "s.sqsh", *FAST, DOCKER_HOST="ssh://me@there", PATH=path)
    assert done.returncode == 0, done.stderr
    assert (tools / "asked").read_text().startswith("-l me")


def test_an_image_of_containerd_s_store_is_packed(tmp_path: Path) -> None:
    """Newer daemons have no layer folders; an image's ID is its manifest's, its layers gzipped."""
    image = Image([BASE, CODE], packing="gzip", config=HONEST)
    address = write(image, "docker-archive", tmp_path / "image.tar")
    facts = {
        "Id": f"sha256:{'1' * 64}",
        "Created": "2024-02-29T12:00:00Z",
        "Size": 1000,
        "RootFS": {"Type": "layers", "Layers": [sha256(BASE), sha256(CODE)]},
        "Config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]},
    }
    steps = [
        {"Created": 1709208000, "CreatedBy": one["created_by"]}
        for one in reversed(HONEST({})["history"])
    ]
    answers = {
        "/x/json": json.dumps(facts).encode(),
        "/history": json.dumps(steps).encode(),
        "/get": (tmp_path / "image.tar").read_bytes(),
    }
    with docker_api.answering(answers):
        found = by_root("dockerd://x", tmp_path / "found.sqsh")
    assert found.read_bytes() == by_root(address, tmp_path / "archive.sqsh").read_bytes()
