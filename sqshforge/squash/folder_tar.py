"""A folder as the same tar that the archive reader makes of the image, hot files first.

To let mksquashfs start compressing at once, the hot files are found by their list and sent before
the rest of the folder is scanned; every other file follows as soon as it is found. The content of
large files goes from the page cache into the pipe without a copy.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO

from sqshforge.errors import WorkError
from sqshforge.hot import HotList, generalized, walk_order
from sqshforge.image.enroot import CARRIED, is_left_out
from sqshforge.image.layer_folders import LayerFolders, is_metadata_alone
from sqshforge.tar.reader import CHAR, DISK, FIFO, FILE, FOLDER, LINK, PIECE, SYMLINK
from sqshforge.tar.writer import Output, made

KINDS = {
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: DISK,
}
DEVICES = (CHAR, DISK)
FOUND = os.O_NOFOLLOW | os.O_CLOEXEC  # to open an entry that a scan found
READ = os.O_RDONLY | os.O_NONBLOCK | FOUND  # it may have become a pipe that nobody writes to
SMALL = 64 << 10  # bytes: up to this size a copy costs less than one more system call
NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system cannot splice


@dataclass(frozen=True)
class Folder:
    """A folder to pack, without entries that are left out; with `split`, without /sqshforge."""

    root: bytes
    split: bool
    _listed: dict[bytes, dict[bytes, os.DirEntry[bytes]]] = field(default_factory=dict)
    _found: dict[bytes, list[bytes]] = field(default_factory=dict)

    def hot(self, hot: HotList) -> list[bytes]:
        """The files that a list names, in its order, as `HotList.found` gives among all files."""
        return [
            path
            for line in hot.lines
            for path in sorted(self._candidates(os.fsencode(line)), key=walk_order)
            if self._entry(path).is_file(follow_symlinks=False)
            and generalized(os.fsdecode(path)) == line
        ]

    def walk(self) -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
        """All its entries in the order of a walk; each folder is scanned when it is reached."""
        todo = self._sorted(b"")
        while todo:
            path, entry = todo.pop()
            yield path, entry
            if entry.is_dir(follow_symlinks=False):
                todo += self._sorted(path)

    def _sorted(self, above: bytes) -> list[tuple[bytes, os.DirEntry[bytes]]]:
        """A folder's entries, last first. Sorted by name, they are in the order of a walk."""
        found = self._listed.get(above) or self._scanned(above)
        return sorted(found.items(), key=itemgetter(0), reverse=True)

    def _candidates(self, line: bytes) -> list[bytes]:
        """The paths that a line may name: a star stands for anything within a name."""
        if line not in self._found:
            above, _, name = line.rpartition(b"/")
            folders = self._candidates(above) if above else [b""]
            self._found[line] = [path for one in folders for path in self._named(one, name)]
        return self._found[line]

    def _named(self, above: bytes, name: bytes) -> list[bytes]:
        if above and not self._entry(above).is_dir(follow_symlinks=False):
            return []
        entries = self._entries(above)
        begin, star, end = name.partition(b"*")
        if not star:
            path = above + b"/" + name if above else name
            return [path] if path in entries else []
        begin, end = above + b"/" + begin if above else begin, end.rpartition(b"*")[2]
        return [path for path in entries if path.startswith(begin) and path.endswith(end)]

    def _entry(self, path: bytes) -> os.DirEntry[bytes]:
        return self._entries(path.rpartition(b"/")[0])[path]

    def _entries(self, above: bytes) -> dict[bytes, os.DirEntry[bytes]]:
        """A folder's entries, by path."""
        if above not in self._listed:
            self._listed[above] = self._scanned(above)
        return self._listed[above]

    def _scanned(self, above: bytes) -> dict[bytes, os.DirEntry[bytes]]:
        found, carried = {}, os.fsencode(CARRIED)
        try:
            listed = os.scandir(self.root + b"/" + above)
        except PermissionError:
            raise _unreadable(above) from None
        with listed as entries:
            # Entries that are left out lie at the top, or in a folder that is left out entirely.
            if above and not is_left_out(above + b"/"):
                return {above + b"/" + entry.name: entry for entry in entries}
            for entry in entries:
                path = above + b"/" + entry.name if above else entry.name
                if not is_left_out(path) and not (self.split and path == carried):
                    found[path] = entry
        return found


def write(
    out: IO[bytes],
    root: Path,
    hot: HotList,
    advance: Callable[[int], object],
    *,
    split: bool,
    devices: bool,
    layers: Sequence[Path] = (),
) -> list[bytes]:
    """Write a folder as a tar, its files of the list `hot` first; return those files.

    `advance` is called with counts of bytes written. `layers` are the folders, highest first, that
    `root` is merged from, if it is; most files are then read from them. Raises `WorkError` for a
    file that shrinks meanwhile or that this user may not read.
    """
    folder = Folder(os.fsencode(root), split)
    first = folder.hot(hot)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        writer = _Writer(top, LayerFolders(layers), out, Output(out, xattrs=False), advance)
        writer.files(first)
        others: list[bytes] = []
        writer.files(_rest(folder, set(first), others))
        # For each entry mksquashfs searches what its folders hold so far, newest first. A folder
        # came with its first file, so in reverse order each one is found early.
        writer.others(reversed(others), devices=devices)
        writer.output.end()
    finally:
        os.close(top)
    return first


def _rest(folder: Folder, taken: set[bytes], others: list[bytes]) -> Iterator[bytes]:
    """The files that are not in `taken`; entries that are not files go into `others`."""
    for path, entry in folder.walk():
        if not entry.is_file(follow_symlinks=False):
            others.append(path)
        elif path not in taken:
            yield path


@dataclass
class _Writer:
    """Writes entries of the folder `top` (a descriptor) in the order in which they come."""

    top: int
    layers: LayerFolders
    out: IO[bytes]
    output: Output
    advance: Callable[[int], object]
    # The first name of each inode with several: the others become links to it.
    named: dict[tuple[int, int], bytes] = field(default_factory=dict)
    is_spliced: bool = True
    gone: int = 0  # bytes not reported yet

    def files(self, paths: Iterable[bytes]) -> None:
        # The kernel resolves a path name by name, so the folder of the last file stays open.
        above, folder, is_layer = b"", os.dup(self.top), False
        path = b""
        try:
            for path in paths:
                parent, _, name = path.rpartition(b"/")
                if parent != above:
                    alone = self.layers.alone(parent)
                    other = os.open(alone or parent or b".", os.O_PATH | FOUND, dir_fd=self.top)
                    os.close(folder)
                    above, folder, is_layer = parent, other, alone is not None
                opened = self._from_layer(name, folder) if is_layer else None
                if opened is None:
                    whole = (path, self.top) if is_layer else (name, folder)
                    file = os.open(whole[0], READ, dir_fd=whole[1])
                    opened = file, os.fstat(file)
                try:
                    self._file(path, *opened)
                finally:
                    os.close(opened[0])
        except PermissionError:
            raise _unreadable(path) from None
        finally:
            os.close(folder)

    def _from_layer(self, name: bytes, folder: int) -> tuple[int, os.stat_result] | None:
        """Open a file in the only layer that has its folder; None if the merge has to be read.

        That is so if the layer lacks the file, if it has several names (only the merge shows them
        with one device), or if its content is in another layer.
        """
        try:
            file = os.open(name, READ, dir_fd=folder)
        except FileNotFoundError:
            return None
        found = os.fstat(file)
        if found.st_nlink == 1 and not is_metadata_alone(file):
            return file, found
        os.close(file)
        return None

    def others(self, paths: Iterable[bytes], *, devices: bool) -> None:
        """Write entries that are not files; sockets are left out, devices too unless asked for."""
        for path in paths:
            try:
                found = os.lstat(path, dir_fd=self.top)
            except PermissionError:
                raise _unreadable(path) from None
            kind = KINDS.get(stat.S_IFMT(found.st_mode))
            if kind is None or (kind in DEVICES and not devices):
                continue
            if kind != FOLDER and found.st_nlink > 1 and self._is_link(path, found):
                continue
            target = os.readlink(path, dir_fd=self.top) if kind == SYMLINK else b""
            one = made(path, kind, stat.S_IMODE(found.st_mode), _time(found), target=target)
            if kind in DEVICES:
                one = one._replace(device=(os.major(found.st_rdev), os.minor(found.st_rdev)))
            self.output.header(one, path)

    def _file(self, path: bytes, file: int, found: os.stat_result) -> None:
        if found.st_nlink > 1 and self._is_link(path, found):
            return
        size, mode = found.st_size, stat.S_IMODE(found.st_mode)
        if size <= SMALL:
            data = os.read(file, size)
            self.output.small(path, mode, _time(found), data)
            rest = size - len(data)
            self._tell(size)
        else:
            self.output.header(made(path, FILE, mode, _time(found), size), path)
            self.output.flush()
            self.out.flush()
            rest = size
            while rest and (gone := self._pass_on(file, rest)):
                rest -= gone
                self._tell(gone)
            self.output.fill(size)
        if rest:
            raise WorkError("a file shrank while it was being packed", where=os.fsdecode(path))

    def _pass_on(self, file: int, size: int) -> int:
        """Pass bytes of an open file on; return how many, 0 at its end."""
        if self.is_spliced:
            try:
                return os.sendfile(self.out.fileno(), file, None, min(size, PIECE))
            except OSError as error:
                if error.errno not in NO_SPLICE:
                    raise
                self.is_spliced = False
        data = os.read(file, min(size, PIECE))
        self.output.data(data)
        self.output.flush()
        return len(data)

    def _tell(self, count: int) -> None:
        self.gone += count
        if self.gone >= PIECE:
            self.advance(self.gone)
            self.gone = 0

    def _is_link(self, path: bytes, found: os.stat_result) -> bool:
        """Write an entry as a link if another name of it was written already."""
        name = self.named.setdefault((found.st_dev, found.st_ino), path)
        if name == path:
            return False
        self.output.header(made(path, LINK, 0, 0, target=name), path)
        return True


def _unreadable(path: bytes) -> WorkError:
    return WorkError(
        "this user may not read all of the image",
        where=f"/{os.fsdecode(path)} in it",
        fix="pack as root, or let all users read it: chmod -R a+rX FOLDER, as its owner",
    )


def _time(found: os.stat_result) -> int:
    return max(0, int(found[stat.ST_MTIME]))
