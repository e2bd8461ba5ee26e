"""Temporary folders and names that tell their owner, so that leftovers can be removed.

A folder is locked while it is in use, and the kernel drops the lock when its holder ends, in
whatever way. So a folder with such a name that nobody has locked is abandoned, and the next command
that makes one of its kind removes it. A container cannot be locked, nor can a folder on some file
systems. So the name also holds the number of its process and of that process's PID namespace: only
in the same namespace can another process check whether it has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqshforge.host import syscalls
from sqshforge.host.rootpath import unescape

TIMEOUT = 5.0  # seconds to wait for processes that still write to a folder
BUSY = (errno.ENOTEMPTY, errno.ENOENT, errno.EBUSY)  # something else makes or removes files there
OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def name(kind: str) -> str:
    """Make a new name of a kind (a word) that holds this machine's name and this process's id."""
    return f"sqshforge-{kind}-{_node()}.{_namespace()}.{os.getpid()}.{uuid.uuid4().hex[:12]}"


def is_ours(name: str) -> bool:
    """Whether the function `name` made this name, on this machine."""
    return _pattern("").fullmatch(name) is not None


def abandoned(names: Iterable[str], kind: str = "") -> list[str]:
    """The names, of one kind or of all, whose processes on this machine have ended."""
    found = ((one, _pattern(kind).fullmatch(one)) for one in names)
    return [one for one, match in found if match and _is_ended(match)]


def clear(place: Path) -> None:
    """Remove a folder as far as this user may; mounts in it are unmounted, never emptied.

    If other processes still write to it, retry for up to `TIMEOUT` seconds.
    """
    for mount in mounts(place):
        with suppress(OSError):
            syscalls.detach(mount)
    deadline = time.monotonic() + TIMEOUT
    while place.exists() and not mounts(place):
        try:
            shutil.rmtree(place)
        except OSError as error:
            if error.errno not in BUSY or time.monotonic() > deadline:
                return
            time.sleep(0.05)


@contextmanager
def folder(
    kind: str,
    clear: Callable[[Path], None] = clear,
    *,
    mode: int = 0o700,
    above: Path | None = None,
) -> Iterator[Path]:
    """Make an empty folder for the length of a block, in `above` or the folder of temporary files.

    First, abandoned folders of the kind are removed. `clear` removes those and this one.
    """
    above = above or Path(tempfile.gettempdir())
    for one in abandoned_folders(above, kind):
        clear(one)
    place, held = _made(above, kind)
    try:
        place.chmod(mode)
        yield place
    finally:
        clear(place)
        os.close(held)


def abandoned_folders(above: Path, kind: str = "") -> list[Path]:
    """Folders of this user whose commands were killed before they could remove them.

    In a folder that this user may write to but not list, none are found.
    """
    try:
        found = sorted(above.iterdir())
    except PermissionError:
        return []
    return [one for one in found if _is_abandoned(one, kind)]


def mounts(place: Path) -> list[Path]:
    """The mount points at and below a folder, the last mounted first."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    points = [Path(unescape(line.split(" ")[4])) for line in lines]
    real = place.resolve()
    return [one for one in reversed(points) if one.is_relative_to(real)]


def _made(above: Path, kind: str) -> tuple[Path, int]:
    """Make a new folder; return it and the descriptor that holds its lock."""
    while True:
        place = above / name(kind)
        place.mkdir(mode=0o700)
        # Before it is locked, another command may take it for abandoned and remove it.
        with suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as opened:
            descriptor = os.open(place, OPENED)
            opened.callback(os.close, descriptor)
            lock(descriptor)
            if place.exists():
                opened.pop_all()
                return place, descriptor


def lock(descriptor: int) -> bool:
    """Lock a file; return whether its file system can. `BlockingIOError` if another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_abandoned(place: Path, kind: str) -> bool:
    match = _pattern(kind).fullmatch(place.name)
    if match is None:
        return False
    try:
        if place.lstat().st_uid != os.geteuid():
            return False
        descriptor = os.open(place, OPENED)
    except OSError:  # it is gone or not a folder
        return False
    try:
        return lock(descriptor) or _is_ended(match)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _pattern(kind: str) -> re.Pattern[str]:
    word = kind or "[a-z]+"
    numbers = r"(?P<namespace>\d+)\.(?P<process>\d{1,9})"
    return re.compile(rf"sqshforge-{word}-{re.escape(_node())}\.{numbers}\.[0-9a-f]{{12}}")


def _is_ended(match: re.Match[str]) -> bool:
    """Whether the process of a name has ended; False if its number is of another namespace.

    kill(2) asks the kernel: /proc may hide the processes of other users (hidepid).
    """
    if match["namespace"] != _namespace():
        return False
    try:
        os.kill(int(match["process"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _namespace() -> str:
    """The inode number of this process's PID namespace."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _node() -> str:
    return re.sub(r"[^\w.-]", "-", os.uname().nodename, flags=re.ASCII)
