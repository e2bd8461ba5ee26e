"""The merge of an archive's layers, compared with docker's and buildah's of the same archive."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
import uuid
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from tests.support import archives, engines
from tests.support.archives import Image, file, folder, layer, link, symlink
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

# Stacks that engines accept: test_archive_hostile has those that they refuse.
STACKS: dict[str, list[bytes]] = {
    "whiteouts": [
        layer(folder("d"), file("d/x"), file("d/y"), file("a"), file("b"), symlink("l", "a")),
        layer(file("d/.wh.x"), file(".wh.a"), file(".wh.l"), file(".wh.none")),
        layer(file("a", b"back"), file("n/.wh.b"), file(".wh..wh.plnk")),
    ],
    "opaque": [
        layer(folder("d"), file("d/x"), folder("d/e"), file("d/e/y"), file("top")),
        layer(folder("d"), file("d/.wh..wh..opq"), file("d/z"), folder("d/e"), file("d/e/w")),
        layer(folder("f"), file("f/.wh..wh..opq"), file("f/x"), symlink("f/.wh.x2", "x")),
    ],
    "kinds": [
        layer(
            file("a", b"1"), folder("b"), file("b/x"), symlink("c", "b"), folder("e"), file("e/f")
        ),
        layer(folder("a"), file("a/y"), file("b", b"2"), folder("c"), file("c/z")),
        layer(file("a", b"3"), symlink("b", "c"), symlink("e", "/nowhere"), file("c/zz")),
    ],
    "links": [
        layer(
            folder("d"), file("d/z", b"z"), link("a", "d/z"), link("d/m", "/a"), symlink("s", "a")
        ),
        layer(
            file("d/.wh.z"), file("q", b"q"), link("r", "./q"), symlink("t", "q"), link("u", "t")
        ),
        layer(file("a", b"new")),
    ],
    "behind links": [
        layer(folder("usr"), folder("usr/lib"), symlink("lib", "usr/lib"), file("lib/a", b"a")),
        layer(folder("usr"), folder("usr/lib"), symlink("l2", "/usr/lib"), file("l2/b", b"b")),
        layer(folder("x"), folder("x/y"), symlink("x/up", "../../.."), file("x/up/c", b"c")),
        layer(file("lib/over", b"over")),
    ],
    "names": [
        layer(file("./a"), file("/b"), file("c//d"), folder("e/./f"), file("g/../h"), folder("./")),
        layer(file("caf\udce9"), file("n" * 200), file("d/" * 60 + "deep"), file("new\nline")),
    ],
    "facts": [
        layer(
            folder("tmp", 0o1777, mtime=5),
            file("suid", b"x", mode=0o4755),
            file("locked", b"x", mode=0o000),
            folder("shut", 0o555),
            file("pipe", type=tarfile.FIFOTYPE),
            file("c", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            file("gone"),
        ),
        layer(folder("shut", 0o2711, mtime=9), file("gone", type=tarfile.CHRTYPE)),
        layer(folder("tmp", 0o1777, mtime=6), file("tmp/x")),
    ],
}
# What engines add themselves, or leave to chance.
THEIRS = {"dev", "etc", "proc", "sys", ".dockerenv", "run"}


def facts(tree: archives.Tree) -> dict[str, tuple[object, ...]]:
    """Return all that is compared of a tree, by name; a link stands for its group of names."""
    group = {
        name: member.linkname if member.islnk() else name for name, (member, _) in tree.items()
    }
    members: dict[str, list[str]] = {}
    for name in sorted(tree):
        members.setdefault(group[name], []).append(name)
    found = {}
    for name in sorted(tree):
        member, content = tree[group[name]]
        mode = member.mode | (0o700 if member.isdir() else 0o400 if member.isreg() else 0)
        found[name] = (
            "link" if member.issym() else stat.filemode(_kind(member) | mode),
            member.linkname if member.issym() else content,
            int(member.mtime) if not member.isdir() else 0,  # for implied folders: the current time
            tuple(members[group[name]]),
        )
    return {name: found[name] for name in found if name.split("/")[0] not in THEIRS}


def _kind(member: tarfile.TarInfo) -> int:
    if member.isdir():
        return stat.S_IFDIR
    return {tarfile.FIFOTYPE: stat.S_IFIFO, tarfile.CHRTYPE: stat.S_IFCHR}.get(
        member.type, stat.S_IFREG
    )


def of_docker(address: str) -> archives.Tree:
    """Return the file system of a docker container of an archive's image."""
    name = f"test-{uuid.uuid4().hex}"
    docker = str(engines.CLIENT)
    Programs().capture([docker, "load", "--input", address.partition(":")[2]])
    Programs().capture([docker, "create", "--name", name, "test:latest", "/bin/sh"])
    try:
        data = subprocess.run(
            [docker, "export", name], check=True, capture_output=True, timeout=60
        ).stdout
    finally:
        Programs().capture([docker, "rm", name])
        Programs().capture([docker, "rmi", "test:latest"])
    return {name.removesuffix("/"): one for name, one in archives.parsed(data).items()}


def of_buildah(address: str) -> archives.Tree:
    """Return the file system of a buildah container of an archive's image, which it mounts."""
    script = 'tar --create --format=posix --directory="$(buildah mount "$0")" .'
    name = Programs().capture(["buildah", "from", "--pull", address]).split()[-1]
    try:
        user = [] if os.geteuid() == 0 else ["buildah", "unshare"]
        argv = [*user, "sh", "-c", script, name]
        done = subprocess.run(argv, check=False, capture_output=True, timeout=60)
    finally:
        Programs().capture(["buildah", "rm", name])
    # Some kernels' overlayfs lists a whiteout of nothing, although it is not there.
    said = done.stderr.splitlines()
    assert all(line.endswith(b"File removed before we read it") for line in said), said
    found = archives.parsed(done.stdout)
    for member, _ in found.values():
        member.linkname = member.linkname.removeprefix("./") if member.islnk() else member.linkname
    return {name.removeprefix("./"): one for name, one in found.items() if name != "."}


def ours(address: str) -> archives.Tree:
    return archives.parsed(archives.output(address, files={}))


@pytest.mark.parametrize("name", STACKS)
def test_docker_sees_the_same(name: str, docker: str, tmp_path: Path) -> None:
    address = archives.write(Image(STACKS[name]), "docker-archive", tmp_path / "image.tar")
    assert facts(ours(address)) == facts(of_docker(address))


OF_BUILDAH = [  # it cannot make a device for an ordinary user
    pytest.param(name, marks=[pytest.mark.root] if name == "facts" else []) for name in STACKS
]


@pytest.mark.parametrize("kind", ["oci", "docker-archive"])
@pytest.mark.parametrize("name", OF_BUILDAH)
def test_buildah_sees_the_same(name: str, kind: str, storage: None, tmp_path: Path) -> None:
    image = Image(STACKS[name], "gzip" if kind == "oci" else "tar")
    address = archives.write(image, kind, tmp_path / "image")
    assert facts(ours(address)) == facts(of_buildah(address))
