"""Locks between processes: lock files, in folders that users may share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from sqshforge.host import temporary
from sqshforge.host.files import foreign
from sqshforge.host.terminal import Reporter


@contextmanager
def exclusive(lock: Path, waiting: str, reporter: Reporter) -> Iterator[None]:
    """Hold a lock for the length of a block; report `waiting` if another process has it.

    The kernel drops the lock when its holder ends, in whatever way; the lock file is removed after
    the block. On a file system without locks, a note says so, and the block runs without one.
    """
    said = False
    while True:
        descriptor = _open_lock(lock)
        try:
            try:
                if not _lock(lock, descriptor):
                    _note_without_locks(reporter)
            except BlockingIOError:
                if not said:
                    reporter.say(waiting)
                said = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The previous holder may have removed the file that this process waited for.
            if not _is_same_file(lock, descriptor):
                continue
            try:
                yield
            finally:
                _remove_lock(lock)
            return
        finally:
            os.close(descriptor)


@contextmanager
def unless_held(lock: Path) -> Iterator[bool]:
    """Try a lock without waiting, for the length of a block; yield whether it is held.

    On a file system without locks it is never held: another process may be working.
    """
    descriptor = _open_lock(lock)
    try:
        is_useless = is_held = False
        with suppress(BlockingIOError):
            is_useless = not _lock(lock, descriptor)
            is_held = not is_useless and _is_same_file(lock, descriptor)
        try:
            yield is_held
        finally:
            if is_held or is_useless:
                _remove_lock(lock)
    finally:
        os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Whether a process has a lock; True on a file system without locks, where one may."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open_lock(lock: Path) -> int:
    """Open a lock file; if it is missing, make one for all users, who may share the folder.

    Raises `WorkError` for another user's lock that this one may not open.
    """
    while True:
        with suppress(FileExistsError):
            made = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(lock, made, 0o666)
            with suppress(OSError):
                os.fchmod(descriptor, 0o666)  # whatever the umask is
            return descriptor
        try:
            for how in (os.O_RDWR, os.O_RDONLY):
                with suppress(PermissionError):
                    return os.open(lock, how | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # its holder has just removed it
            continue
        raise foreign("a lock", lock)


def _lock(path: Path, descriptor: int) -> bool:
    """As `temporary.lock`; `WorkError` if NFS refuses to lock a file that is opened read-only."""
    if temporary.lock(descriptor):
        return True
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise foreign("a lock", path)
    return False


def _remove_lock(lock: Path) -> None:
    with suppress(PermissionError):  # another user's, in a folder with the sticky bit
        lock.unlink(missing_ok=True)


@cache
def _note_without_locks(reporter: Reporter) -> None:
    reporter.say("note: this file system has no locks: build and pack from one place at a time")


def _is_same_file(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
