"""Check what an ordinary user needs: user namespaces, id ranges, buildah's storage, /dev/fuse."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqshforge.doctor.finding import OWN_HOME, Finding, Host, tool, version
from sqshforge.engine.buildah import Buildah
from sqshforge.host import suggest
from sqshforge.host.programs import Programs

IDS = 65536  # number of ids that an image's files may have: root's to nobody's
NEWLINE = r"\n"  # for printf
NATIVE_OVERLAY = (6, 6)  # since this Linux, an ordinary user's overlay needs no fuse-overlayfs
FUSE = "modprobe fuse && {0}chmod 0666 /dev/fuse"
# Kernel settings that may forbid namespaces to ordinary users, with their bad and good values.
SWITCHES = (
    ("user.max_user_namespaces", 0, 10000),
    ("kernel.unprivileged_userns_clone", 0, 1),
    ("kernel.apparmor_restrict_unprivileged_userns", 1, 0),
)
# Mounts an overlay in a temporary folder below $0.
OVERLAY = """
place=$(mktemp -d "$0/.sqshforge-XXXXXX") || exit 1
trap 'rm -rf "$place"' EXIT
cd "$place" && mkdir lower upper work merged &&
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work,userxattr overlay merged &&
umount merged
"""


def findings(host: Host, *, builds: bool, runs: bool) -> Iterator[Finding]:
    """Check what this user needs to build with buildah, and to run squash files without enroot."""
    if host.uid == 0:
        return
    if builds or runs:
        yield namespaces(host, needed=runs)
    if builds:
        yield from _ids(host)
        yield from _storage(host)
    yield tool(host, "squashfuse", "mounts a sqsh without root", needed=runs)
    kernel = "".join(host.lines("proc/sys/kernel/osrelease"))
    is_old = needs_fuse_overlayfs(kernel)
    yield tool(host, "fuse-overlayfs", "the same on Linux before 6.6", needed=runs and is_old)
    yield _fuse(host, needed=runs)


def needs_fuse_overlayfs(kernel: str) -> bool:
    """Whether an ordinary user needs it to run any file; one of several owners always does."""
    return version(kernel) < NATIVE_OVERLAY


def namespaces(host: Host, *, needed: bool) -> Finding:
    """Check whether this user may make a user namespace and mount in it, by making one."""
    what = "user namespaces (`sqshforge run` as an ordinary user)"
    if host.programs.which("unshare") is None:
        return Finding(what, False, "unshare is missing", host.install("unshare"), needed)
    words = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    tried = host.programs.attempt(words, timeout=20)
    if tried.code == 0:
        return Finding(what, True, "allowed")
    reason = (tried.err.strip().splitlines() or ["no reason given"])[-1]
    for name, bad, good in SWITCHES:
        if host.setting(f"sys/{name.replace('.', '/')}") == bad:
            if "apparmor" in name:
                reason = "AppArmor allows them to programs with a profile of their own alone; "
                reason += "buildah has one"
            detail = f"not allowed: {name} is {bad} ({reason})"
            return Finding(what, False, detail, f"{suggest.sudo()}sysctl {name}={good}", needed)
    fix = "ask whoever runs this machine; a container of docker needs --privileged for them"
    return Finding(what, False, f"not allowed: {reason}", fix, needed)


def _ids(host: Host) -> Iterator[Finding]:
    for name in ("newuidmap", "newgidmap"):
        yield tool(host, name, "gives an ordinary user the ids of an image's files")
    if any(line.split()[:1] == ["subid:"] and "files" not in line for line in _nsswitch(host)):
        yield Finding("ranges of ids", True, "given by a directory service (/etc/nsswitch.conf)")
        return
    lacking = [name for name in ("uid", "gid") if _given(host, f"etc/sub{name}") < IDS]
    start = max([100000, *_ends(host, "etc/subuid"), *_ends(host, "etc/subgid")])
    options = "".join(f" --add-sub{name}s {start}-{start + IDS - 1}" for name in lacking)
    where = " and ".join(f"/etc/sub{name}" for name in lacking)
    yield Finding(
        "ranges of ids (the files of an image have several owners)",
        not lacking,
        f"{where} give {host.user} fewer than {IDS}" if lacking else "/etc/subuid, /etc/subgid",
        f"{suggest.sudo()}usermod{options} {host.user}",
    )


def _nsswitch(host: Host) -> list[str]:
    return host.lines("etc/nsswitch.conf")


def _ranges(host: Host, file: str) -> Iterator[tuple[str, int, int]]:
    """Yield the ranges in /etc/subuid or /etc/subgid: owner, first id, count."""
    for line in host.lines(file):
        owner, _, rest = line.strip().partition(":")
        start, _, count = rest.partition(":")
        if start.isdecimal() and count.isdecimal():
            yield owner, int(start), int(count)


def _given(host: Host, file: str) -> int:
    return sum(count for own, _, count in _ranges(host, file) if own in (host.user, str(host.uid)))


def _ends(host: Host, file: str) -> list[int]:
    return [start + count for _, start, count in _ranges(host, file)]


def _fuse(host: Host, *, needed: bool) -> Finding:
    is_open, detail = fuse(host)
    fix = f"{suggest.sudo()}{FUSE.format(suggest.sudo())}"
    return Finding("/dev/fuse (`sqshforge run` as an ordinary user)", is_open, detail, fix, needed)


def fuse(host: Host) -> tuple[bool, str]:
    """Return whether /dev/fuse is open to this user, and its state in words."""
    device = host.root / "dev/fuse"
    if not device.exists():
        return False, "not there"
    if not os.access(device, os.R_OK | os.W_OK):
        return False, f"not open to {host.user}: its mode is {device.stat().st_mode & 0o777:04o}"
    return True, "open"


@dataclass(frozen=True)
class Storage:
    """How buildah combines an image's layers, and where it stores them."""

    driver: str  # "overlay" (the kernel's), "fuse-overlayfs" or "vfs"
    folder: Path


def storage(buildah: Path, programs: Programs) -> Storage | str:
    """Return the storage that buildah reports, or its error message."""
    asked = programs.attempt([buildah, "info"], timeout=60)
    if asked.code != 0:
        return (asked.err.strip().splitlines() or ["no reason given"])[-1]
    store = json.loads(asked.out)["store"]
    options = store.get("GraphOptions") or {}
    by_program = any("mount_program" in str(one) for one in options)
    driver = "fuse-overlayfs" if by_program else str(store["GraphDriverName"])
    return Storage(driver, Path(store["GraphRoot"]))


def overlay_works(buildah: Path, folder: Path, programs: Programs) -> bool:
    """Whether the kernel lets this user mount an overlay in a folder, by trying it."""
    words: list[str | Path] = [buildah, "unshare", "--", "sh", "-c", OVERLAY, folder]
    return programs.attempt(words, timeout=60).code == 0


def _storage(host: Host) -> Iterator[Finding]:
    what = "storage of buildah"
    try:
        buildah = Buildah.find(host.programs).program  # configured as for a build
        found = storage(buildah, host.programs)
    except OSError as error:
        yield Finding(what, False, str(error), OWN_HOME)
        return
    if isinstance(found, str):
        yield Finding(what, False, found, "the findings above, or docker")
        return
    if found.driver not in ("vfs", "fuse-overlayfs"):
        yield Finding(what, True, f"the kernel's overlay, in {found.folder}")
        return
    has_fuse = host.programs.which("fuse-overlayfs") is not None
    is_open, state = fuse(host)
    if found.driver == "fuse-overlayfs":
        yield Finding(
            what,
            has_fuse and is_open,
            f"fuse-overlayfs, in {found.folder}; /dev/fuse: {state}",
            f"{suggest.sudo()}{FUSE.format(suggest.sudo())}"
            if has_fuse
            else host.install("fuse-overlayfs"),
        )
        return
    detail = f"vfs, in {found.folder}: every layer is copied whole, which is slow and large"
    setting = f'[storage]{NEWLINE}driver = "overlay"{NEWLINE}'
    if not overlay_works(buildah, found.folder, host.programs):
        if not has_fuse or not is_open:
            opened = "" if is_open else f"{suggest.sudo()}{FUSE.format(suggest.sudo())}"
            fix = " && ".join(one for one in (opened, _fuse_overlayfs(host, has_fuse)) if one)
            fix += "; or Linux 5.13 or later, and a local file system there"
            yield Finding(what, False, detail, fix, needed=False)
            return
        setting += f"[storage.options.overlay]{NEWLINE}"
        setting += f'mount_program = "{host.programs.which("fuse-overlayfs")}"{NEWLINE}'
    file = Path("~/.config/containers/storage.conf")
    fix = f"mkdir -p {file.parent} && printf '{setting}' > {file}"
    if file.expanduser().exists():  # it must not be overwritten
        fix = f"in {file}: {' '.join(setting.split(NEWLINE))}".rstrip()
    yield Finding(what, False, detail, fix, needed=False)


def _fuse_overlayfs(host: Host, is_there: bool) -> str:
    return "" if is_there else host.install("fuse-overlayfs")
