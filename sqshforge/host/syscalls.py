"""System calls that Python 3.10 does not offer and that no program can make for its caller."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MNT_DETACH = 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOSYMFOLLOW = 1, 2, 4, 8, 1 << 8
MS_REMOUNT, MS_BIND = 1 << 5, 1 << 12
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal: int, parent: int) -> None:
    """Get a signal when this parent process ends, or at once if it has ended already."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal)


def pivot(root: Path) -> None:
    """Make a mounted folder the root of this process and of its mount namespace.

    pivot_root(".", ".") stacks the old root on the new one, so that no folder in the image has
    to hold it (pivot_root(2), notes).
    """
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def detach(place: Path) -> None:
    """Unmount a mount and all below it lazily: files in use stay open until they are closed."""
    _check(_libc.umount2(os.fsencode(place), MNT_DETACH), "umount2")


def remount_bind(point: Path, flags: int) -> None:
    """Give one mount these flags (MS_RDONLY, MS_NOSUID, ...); its atime flags stay."""
    whole = ctypes.c_ulong(MS_REMOUNT | MS_BIND | flags)
    _check(_libc.mount(None, os.fsencode(point), None, whole, None), f"mount {point}")


def forbid_new_privileges() -> None:
    """Keep programs from giving this process more rights by set-user-id or capabilities."""
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def allocate(descriptor: int, size: int) -> None:
    """Allocate `size` bytes for a file, if its file system can.

    Unlike `os.posix_fallocate`, it raises `OSError` if not, and does not write zeros instead.
    """
    _check(_libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)), "fallocate")


def begin_writing(descriptor: int) -> None:
    """Have the kernel begin to write a file's dirty pages to the disk, without waiting for it."""
    everything = ctypes.c_long(0), ctypes.c_long(0)
    _check(_libc.sync_file_range(descriptor, *everything, SYNC_FILE_RANGE_WRITE), "sync_file_range")


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of these kinds (CLONE_NEW...)."""
    _check(_libc.unshare(kinds), "unshare")


def enter(namespace: int, kind: int) -> None:
    """Enter a namespace of this kind, given as a descriptor of its file in /proc."""
    _check(_libc.setns(namespace, kind), "setns")


def become(uid: int, gid: int) -> None:
    """Take the caller's own uid and gid again, in a user namespace inside that of the set-up."""
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} 0 1")
    Path("/proc/self/gid_map").write_text(f"{gid} 0 1")


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
