"""A folder as the tar that a reader of archives makes of the same image, its files in any order.

Folders, links and the like are a header each, which we write. The files are GNU tar's: it reads
them faster than we could, and finds those that have several names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sqshforge.host.programs import Programs, failed
from sqshforge.hot import walk_order
from sqshforge.image.enroot import CARRIED, is_left_out
from sqshforge.tar.reader import CHAR, DISK, FIFO, FOLDER, LINK, SYMLINK, Entry
from sqshforge.tar.writer import Output, made

KINDS = {
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: DISK,
}
DEVICES = (CHAR, DISK)


@dataclass(frozen=True)
class Tree:
    """What a folder has, each in the order of a walk: paths from its top."""

    files: list[bytes]
    others: list[bytes]


def scan(root: Path, *, split: bool, devices: bool) -> Tree:
    """Look through a folder, without what is not packed: /sqshforge where it is `split` off."""
    top, carried = os.fsencode(root), os.fsencode(CARRIED)
    files, others, todo = list[bytes](), list[bytes](), [b""]
    while todo:
        above = todo.pop()
        with os.scandir(top + b"/" + above) as entries:
            for entry in entries:
                path = above + b"/" + entry.name if above else entry.name
                if is_left_out(path) or (split and path == carried):
                    continue
                if entry.is_file(follow_symlinks=False):
                    files.append(path)
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(path)
                elif not devices and not entry.is_symlink():
                    kind = KINDS.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode))
                    if kind in DEVICES:
                        continue
                others.append(path)
    return Tree(sorted(files, key=walk_order), sorted(others, key=walk_order))


def write_others(out: IO[bytes], root: Path, tree: Tree) -> None:
    """Write all that is no file, as the begin of a tar; sockets are left out."""
    top, output = os.fsencode(root), Output(out, xattrs=False)
    first: dict[tuple[int, int], bytes] = {}
    for path in tree.others:
        found = os.lstat(top + b"/" + path)
        kind = KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            continue
        # As it is: a Path would leave out a slash at its end.
        target = os.readlink(top + b"/" + path) if kind == SYMLINK else b""  # noqa: PTH115
        name = path
        if kind != FOLDER and found.st_nlink > 1:
            name = first.setdefault((found.st_dev, found.st_ino), path)
        if name != path:
            output.header(made(path, LINK, 0, 0, target=name), path)
            continue
        mtime = max(0, int(found.st_mtime))
        one = made(path, kind, stat.S_IMODE(found.st_mode), mtime, target=target)
        output.header(_with_device(one, found.st_rdev), path)
    output.flush()


def _with_device(entry: Entry, device: int) -> Entry:
    if entry.kind not in DEVICES:
        return entry
    return entry._replace(device=(os.major(device), os.minor(device)))


@contextlib.contextmanager
def files(out: IO[bytes], root: Path, paths: Sequence[bytes], programs: Programs) -> Iterator[None]:
    """Have GNU tar write files in this order, and the end of the tar, during a block.

    Raises `WorkError` with its words where it fails.
    """
    with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as said:
        listed.write(b"".join(path + b"\0" for path in paths))
        listed.seek(0)
        argv = ["tar", "--create", "--format=gnu", "--blocking-factor=256", "--mode=u+r"]
        argv += ["--no-recursion", "--no-unquote", "--null", "--files-from=-"]
        with programs.start(
            argv, stdin=listed, stdout=out, stderr=said, cwd=root, env={"LC_ALL": "C"}
        ) as process:
            yield
            code = process.wait()
        # mksquashfs may be gone before the zeros that follow the end.
        if code not in (0, -signal.SIGPIPE):
            said.seek(0)
            raise failed(argv, code, said.read().decode(errors="replace").splitlines())
