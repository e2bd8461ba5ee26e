"""A tiny root file system with one of each kind of problematic entry, and images made from it."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqshforge.host.programs import Programs
from tests.support.engines import CLIENT

TIME = 1_600_000_000  # of the oldest entry; every other one has a different time
OWNER = (1000, 50)
# Capability set v2, effective, cap_net_bind_service: linux/capability.h, struct vfs_cap_data.
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")

FILES = ("etc/environment", "etc/fstab", "etc/rc", "etc/rc.local")

DOCKERFILE = r"""
FROM scratch
ADD rootfs.tar /
ENV GREETING="hello = world" EMPTY="" QUOTED="it's \"so\""
LABEL org.example.title="two\
 words" org.example.note="it's a note"
VOLUME ["/scratch disk", "/data"]
WORKDIR /made/by workdir
ENTRYPOINT ["/bin/say", "it's", "$HOME", "two words"]
CMD ["--default", "a \"quoted\" word"]
"""


def make(tree: Path) -> Path:
    """Write the tree, owned by OWNER, with a fixed time for each entry."""
    for name in ("bin", "etc/rc.d", "data/sub", "dev/pts", "run", "lib", "names", "usr/dev"):
        (tree / name).mkdir(parents=True)
    _modes(tree)
    _names(tree)
    _replaced(tree)
    for index, path in enumerate(sorted(tree.rglob("*"), reverse=True)):
        os.lchown(path, *OWNER)  # this clears a file's setuid bit
        os.utime(path, (TIME + index, TIME + index), follow_symlinks=False)
    (tree / "bin/passwd").chmod(0o4755)
    (tree / "bin/write").chmod(0o2755)
    os.setxattr(tree / "bin/ping", "security.capability", CAPABILITY)
    return tree


def _modes(tree: Path) -> None:
    for name in ("passwd", "write", "ping"):
        (tree / "bin" / name).write_bytes(name.encode() * 1000)
        (tree / "bin" / name).chmod(0o755)
    (tree / "tmp").mkdir()
    (tree / "tmp").chmod(0o1777)
    for mode in (0o000, 0o555, 0o300):
        folder = tree / f"dir-{mode:03o}"
        folder.mkdir()
        (folder / "inside").write_text("inside")
        folder.chmod(mode)
    for mode in (0o000, 0o200, 0o111, 0o444):
        file = tree / "data" / f"file-{mode:03o}"
        file.write_text(f"mode {mode:o}")
        file.chmod(mode)
    (tree / "data/one").write_bytes(os.urandom(3 << 20))
    (tree / "data/two").hardlink_to(tree / "data/one")
    (tree / "data/sub/three").hardlink_to(tree / "data/one")
    (tree / "data/empty").touch()
    (tree / "data/zeros").write_bytes(b"begin" + bytes(300_000) + b"end")
    (tree / "data/hole").touch()
    os.truncate(tree / "data/hole", 300_000)
    os.mkfifo(tree / "run/pipe", 0o600)
    os.mknod(tree / "run/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    (tree / "lib/dangling").symlink_to("nowhere/at all")
    (tree / "lib/absolute").symlink_to("/etc/environment")


def _names(tree: Path) -> None:
    names = [b"latin caf\xe9", b"two  spaces ", b"n" * 200, "Träne".encode(), b"star*[a]?"]
    names += [b"-e", b'"quoted"', b"back\\slash", b"new\nline"]
    for name in names:
        (tree / "names" / os.fsdecode(name)).write_bytes(name)
    deep = tree / "names" / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    (deep / "deep").write_text("deep")
    (deep / "link").symlink_to("../" * 60 + "deep")


def _replaced(tree: Path) -> None:
    """Write what enroot leaves out or replaces by its own, and what only looks like that."""
    for name in ("dev/junk", "dev/pts/0", ".dockerenv", "etc/fstab", "etc/environment"):
        (tree / name).write_text("the image's own")
    (tree / "etc/rc").symlink_to("rc.d/script")
    # Its first name is replaced, so its content must survive under the other one.
    (tree / "etc/other-name").hardlink_to(tree / "etc/environment")
    (tree / "lib/third-name").hardlink_to(tree / "etc/environment")
    for name in ("etc/rc.d/rc", "usr/dev/kept", "data/.dockerenv", "etc/environment.d"):
        (tree / name).write_text("kept")


def tar(tree: Path, file: Path) -> Path:
    """Write the tree as a tar, including the file capability."""
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(tree.rglob("*")):
            member = archive.gettarinfo(path, str(path.relative_to(tree)))
            archive.format = tarfile.GNU_FORMAT
            if path == tree / "bin/ping":
                archive.format = tarfile.PAX_FORMAT
                member.pax_headers = {"SCHILY.xattr.security.capability": CAPABILITY.decode()}
            archive.addfile(member, io.BytesIO(path.read_bytes()) if member.isreg() else None)
    return file


class Entry(NamedTuple):
    """Everything that a squash file records about one path."""

    kind: str  # d, f, l (symlink), p (FIFO), b or c (device), s (socket)
    mode: int
    owner: tuple[int, int]
    mtime: int | None  # None: not compared
    content: str  # a file's checksum, a link's target, a device's number
    names: frozenset[str]  # all paths of the same inode
    xattrs: tuple[str, ...]


def entries(tree: Path) -> dict[str, Entry]:
    """Return the entry of every path below a folder; the folder itself is `.`."""
    paths = [tree, *tree.rglob("*")]
    groups: dict[int, set[str]] = {}
    for path in paths:
        groups.setdefault(path.lstat().st_ino, set()).add(str(path.relative_to(tree)))
    return {
        str(path.relative_to(tree)): _entry(path, frozenset(groups[path.lstat().st_ino]))
        for path in paths
    }


def unpacked(sqsh: Path, place: Path) -> dict[str, Entry]:
    """Return the entries of a squash file."""
    Programs().capture(["unsquashfs", "-no-progress", "-dest", place, sqsh])
    return entries(place)


def as_enroot(found: dict[str, Entry]) -> dict[str, Entry]:
    """Return what `enroot import dockerd://` makes of a tree, except for its own four files.

    Enroot is made for ordinary users, who cannot unpack device nodes.
    """
    own = {*FILES, ".dockerenv"}
    kept = {
        path: entry
        for path, entry in found.items()
        if path not in own and not path.startswith("dev/") and entry.kind not in ("b", "c")
    }
    wider = {"d": 0o700, "f": 0o400}
    return {
        path: entry._replace(
            mode=entry.mode | wider.get(entry.kind, 0),
            owner=(0, 0),
            names=entry.names - own,
            xattrs=(),
        )
        for path, entry in kept.items()
    }


def _entry(path: Path, names: frozenset[str]) -> Entry:
    facts = path.lstat()
    kind, content = "f", ""
    if stat.S_ISDIR(facts.st_mode):
        kind = "d"
    elif stat.S_ISLNK(facts.st_mode):
        kind, content = "l", str(path.readlink())
    elif stat.S_ISFIFO(facts.st_mode):
        kind = "p"
    elif stat.S_ISSOCK(facts.st_mode):
        kind = "s"
    elif stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode):
        kind = "c" if stat.S_ISCHR(facts.st_mode) else "b"
        content = str(facts.st_rdev)
    else:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return Entry(
        kind=kind,
        mode=stat.S_IMODE(facts.st_mode),
        owner=(facts.st_uid, facts.st_gid),
        mtime=int(facts.st_mtime),
        content=content,
        names=names if kind != "d" else frozenset(),
        xattrs=tuple(sorted(os.listxattr(path, follow_symlinks=False))),
    )


@contextmanager
def in_buildah(context: Path) -> Iterator[str]:
    """Build the image with buildah from a folder of Dockerfile and rootfs.tar; yields its name."""
    name = f"localhost/sqshforge-test-odd:{uuid.uuid4().hex}"
    programs = Programs()
    argv: list[str | Path] = ["buildah", "build", "--isolation", "chroot", "--format", "docker"]
    programs.capture([*argv, "--quiet", "--tag", name, context])
    try:
        yield name
    finally:
        programs.attempt(["buildah", "rmi", "--force", name])


def in_docker(context: Path, host: str) -> str:
    """Build the same image in a docker daemon, which removes it when it ends."""
    name = "sqshforge-test-odd:1"
    argv: list[str | Path] = [
        CLIENT,
        "--host",
        host,
        "build",
        "--network",
        "host",
        "--tag",
        name,
        context,
    ]
    Programs().capture(argv, env={"DOCKER_BUILDKIT": "1"})
    return name
