"""Judge one node from its report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqshforge.doctor.cluster.facts import Image, Node, Place
from sqshforge.doctor.finding import Finding, version
from sqshforge.doctor.user import FUSE, SWITCHES, needs_fuse_overlayfs
from sqshforge.host import suggest

ROOM = 10**9  # free bytes below which a folder of enroot's is practically full
UNPACKED = 3  # the unpacked files take at least this many times the squash file's size
SLOW = 10.0  # seconds for the first 64 MiB of an image: a start reads several times as much
OWN_PYTHON = (3, 9)  # oldest version for the runtime that images carry
OWN_UNSQUASHFS = (4, 5)  # oldest version that can read that runtime out of an image
RUNTIME = "container runtime"
PYXIS, ENROOT, OWN = "pyxis", "enroot", "the image's own"  # as the launchers choose, in this order


@dataclass(frozen=True)
class Seen:
    """A finding on one node, and the figures that differ from node to node.

    `free` is the free space in bytes, `seconds` the time that reading the image took.
    """

    finding: Finding
    free: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Asked:
    """What the nodes were asked to read, and its right content."""

    folders: tuple[Path, ...] = ()
    digests: tuple[str, ...] = ()  # of the new file in each folder
    image: Path | None = None
    head: Image | None = None  # the beginning of the right image


def runtime(node: Node) -> str:
    """Return the runtime that a launcher uses if this node is the first of its job."""
    return PYXIS if node.pyxis.known else ENROOT if node.enroot.path else OWN


def findings(node: Node, asked: Asked) -> Iterator[Seen]:
    """Yield all findings on one node; without Python, only that."""
    if not node.python:
        yield Seen(
            Finding("python3", False, "not there: nothing else was seen", _install(node, "python3"))
        )
        return
    for fault in node.faults:
        if fault.check != "image":
            fix = f"look at the node: the check `{fault.check}` does not end as it should"
            yield Seen(Finding(f"the check {fault.check}", False, fault.text, fix))
    yield Seen(_python(node))
    yield from _by_check(node)
    yield from map(Seen, (_memlock(node), *_shared(node, asked)))
    if asked.image is not None:
        yield _image(node, asked.image, asked.head)


def _by_check(node: Node) -> Iterator[Seen]:
    """Yield the findings that depend on one check each, if that check gave a result."""
    for check, judged in (
        ("programs", _unsquashfs),
        ("pyxis", _pyxis),
        ("enroot", _enroot),
        ("fuse", _fuse),
        ("programs", _squashfuse),
        ("programs", _fuse_overlayfs),
        ("namespaces", _namespaces),
        ("nvidia", _gpus),
        ("efa", _efa),
        ("needrestart", _needrestart),
    ):
        if not node.fault(check):
            yield from map(Seen, judged(node))
        if check == "enroot":
            yield from (_folder(node, place) for place in node.enroot.folders)


def _install(node: Node, *programs: str) -> str:
    """Return how to install programs on a node, with its own package manager."""

    def which(name: str) -> Path | None:
        return Path("/usr/bin", name) if name == node.installer else None

    return suggest.install(which, *programs)


def _python(node: Node) -> Finding:
    """Judge Python's version, which matters if the image's own runtime starts images."""
    is_enough = version(node.python) >= OWN_PYTHON or runtime(node) != OWN
    fix = "a Python from 3.9 on as python3 on the PATH, or enroot"
    return Finding("python3", is_enough, node.python, fix)


def _unsquashfs(node: Node) -> Iterator[Finding]:
    there = node.programs.unsquashfs
    is_old = runtime(node) == OWN and (0,) < version(there) < OWN_UNSQUASHFS
    detail = f"{there}; 4.5 or later is needed" if is_old else there or "not found"
    what = "unsquashfs (reads an image)"
    yield Finding(what, bool(there) and not is_old, detail, _install(node, "unsquashfs"))


def _pyxis(node: Node) -> Iterator[Finding]:
    pyxis = node.pyxis
    if pyxis.known:
        way = (
            "squashfuse mounts an image (use_squashfuse)"
            if pyxis.squashfuse
            else "each start unpacks the image (use_squashfuse is not set)"
        )
        detail = f"{pyxis.version or 'of unknown version'}; {way}"
        if not node.enroot.path:
            detail += "; it calls enroot, which is not there"
        yield Finding("pyxis", bool(node.enroot.path), detail, "install enroot's own package")
    elif pyxis.plugin:
        detail = f"{pyxis.plugin} is in plugstack.conf, but srun has no --container-image"
        detail += f": {pyxis.fault}" if pyxis.fault else ""
        fix = "`srun --help` there says why: it must be built for the very release of Slurm"
        yield Finding("pyxis", False, detail, fix)
    else:
        detail = f"not there: launchers take {runtime(node)}"
        fix = "https://github.com/NVIDIA/pyxis"
        yield Finding("pyxis", False, detail, fix, needed=False)


def _enroot(node: Node) -> Iterator[Finding]:
    enroot = node.enroot
    if not enroot.path:
        detail = "not found: launchers take the runtime that images carry"
        yield Finding("enroot", False, detail, "install enroot's own package", needed=False)
    elif enroot.fault:
        detail = f"{enroot.path} fails: {enroot.fault}"
        yield Finding("enroot", False, detail, "`enroot version` there says more")
    else:
        yield Finding("enroot", True, f"{enroot.version}, {enroot.path}")


def _folder(node: Node, place: Place) -> Seen:
    """Judge a folder that enroot makes at every call, or when it imports an image."""
    conf, what = f"{node.enroot.settings}/enroot.conf", place.name
    # A folder named after the node counts as the same on all nodes: the setting is the same.
    own = rf"(?<![A-Za-z0-9]){re.escape(node.node)}(?![A-Za-z0-9])"
    path, above = (re.sub(own, "NODE", one) for one in (place.path, place.above))
    if not place.usable:
        closed = path if place.there else f"{path} cannot be made: {above}"
        detail = f"{closed} is not writable for uid {node.uid}"
        fix = f"{what} in {conf}: a folder of the node's own disk that this user may write"
        if what == "ENROOT_RUNTIME_PATH":
            fix = (
                f"{what} /run/enroot/user-$(id -u) in {conf}, and /run/enroot with mode 1777 "
                "(a line `d /run/enroot 1777 root root -` in /etc/tmpfiles.d)"
            )
        return Seen(Finding(what, False, detail, fix, needed=what != "ENROOT_TEMP_PATH"))
    detail = f"{path}, {'' if place.there else 'to be made, '}on {place.kind or 'unknown'}"
    room = 0 if what == "ENROOT_RUNTIME_PATH" else ROOM
    if what == "ENROOT_DATA_PATH" and runtime(node) == PYXIS and not node.pyxis.squashfuse:
        room = max(room, UNPACKED * node.image.size)
    fix = f"make room, or {what} in {conf}: a folder of a larger disk"
    return Seen(Finding(what, place.free >= room, detail, fix, needed=False), free=place.free)


def _by_fuse(node: Node) -> bool:
    """Whether squashfuse mounts images: pyxis may unpack them, and root can use the kernel."""
    way = runtime(node)
    return way == ENROOT or (node.pyxis.squashfuse if way == PYXIS else node.uid != 0)


def _fuse(node: Node) -> Iterator[Finding]:
    fuse = node.fuse
    closed = f"not open to uid {node.uid}: {fuse.fault} (mode {fuse.mode})"
    detail = "open" if fuse.open else closed if fuse.there else "not there"
    fix = f"{suggest.sudo()}{FUSE.format(suggest.sudo())}"
    yield Finding("/dev/fuse (mounts an image)", fuse.open, detail, fix, _by_fuse(node))


def _squashfuse(node: Node) -> Iterator[Finding]:
    tools = node.programs
    needed = _by_fuse(node) or (runtime(node) == OWN and not tools.kernel_squashfs)
    detail = tools.squashfuse or "not found"
    if not tools.squashfuse and not needed:
        detail += "; pyxis unpacks images" if runtime(node) == PYXIS else "; root's kernel does it"
    fix = _install(node, "squashfuse")
    yield Finding("squashfuse (mounts an image)", bool(tools.squashfuse), detail, fix, needed)


def _fuse_overlayfs(node: Node) -> Iterator[Finding]:
    path = node.programs.fuse_overlayfs
    needed = runtime(node) == OWN and node.uid != 0 and needs_fuse_overlayfs(node.kernel)
    if path or needed:
        fix = _install(node, "fuse-overlayfs")
        detail = path or f"not found, and Linux is {node.kernel}"
        yield Finding("fuse-overlayfs (before Linux 6.6)", bool(path), detail, fix, needed)


def _namespaces(node: Node) -> Iterator[Finding]:
    what, needed = "user namespaces", runtime(node) != OWN or node.uid != 0
    if node.namespaces.works or (node.namespaces.enroot and runtime(node) != OWN):
        yield Finding(what, True, "allowed" if node.namespaces.works else "allowed to enroot alone")
        return
    settings = {one.name: one.value for one in node.namespaces.settings}
    fix = "the kernel's settings allow them: slurmd is confined, by a chroot, seccomp or systemd"
    detail = f"not allowed: {node.namespaces.fault}"
    for name, bad, good in SWITCHES:
        if settings.get(name) == bad:
            detail = f"not allowed: {name} is {bad}"
            if "apparmor" in name:
                detail += " (AppArmor: for programs with a profile, as enroot's package has one)"
            fix = f"{suggest.sudo()}sysctl {name}={good}, and a line in /etc/sysctl.d"
            break
    yield Finding(what, False, detail, fix, needed)


def _gpus(node: Node) -> Iterator[Finding]:
    """Judge NVIDIA's cards, and the tools with which every runtime passes them to a container."""
    nvidia = node.nvidia
    count = max(nvidia.cards, nvidia.devices)
    if nvidia.cards > nvidia.devices:
        detail = f"{nvidia.cards} at PCI, {nvidia.devices} of them with a device in /dev"
        fix = "install NVIDIA's driver; where it is there, nvidia-smi and dmesg say more"
        yield Finding("NVIDIA GPUs", False, detail, fix)
    else:
        yield Finding("NVIDIA GPUs", True, str(count or "none"))
    if not count:
        return
    what = "nvidia-container-cli (gives GPUs to a container)"
    detail = (
        f"{nvidia.version or 'of unknown version'}, {nvidia.cli}" if nvidia.cli else "not found"
    )
    fix = "install libnvidia-container-tools, of NVIDIA's package index"
    yield Finding(what, bool(nvidia.cli), detail, fix)
    if node.enroot.path:
        hook = f"{node.enroot.settings}/hooks.d/98-nvidia.sh"
        fix = f"install enroot's package anew, or chmod +x {shlex.quote(hook)}"
        detail = hook if node.enroot.hook else f"{hook} is not there, or not executable"
        yield Finding("enroot's hook for GPUs", node.enroot.hook, detail, fix)


def _efa(node: Node) -> Iterator[Finding]:
    efa = node.efa
    count = max(efa.cards, efa.driven)
    if not count:
        yield Finding("EFA", True, "none")
        return
    usable = min(efa.driven, efa.devices)
    detail = f"{count} cards"
    if usable < count:
        detail += f", {efa.driven} with a driver, {efa.devices} devices in /dev/infiniband"
    fix = "install AWS's EFA installer, which brings the driver; then modprobe efa ib_uverbs"
    yield Finding("EFA", usable >= count, detail, fix)
    is_there = bool(efa.libfabric)
    detail = (
        f"libfabric {efa.libfabric}"
        if is_there
        else "no fi_info on the node; images have their own"
    )
    fix = "AWS's EFA installer"
    yield Finding("fi_info (sees EFA from the node)", is_there, detail, fix, needed=False)


def _memlock(node: Node) -> Finding:
    """Judge the hard limit on locked memory, which EFA and InfiniBand need to register buffers."""
    is_free = node.memlock < 0
    detail = "unlimited" if is_free else f"at most {node.memlock / 1024:.0f} KiB"
    fix = "LimitMEMLOCK=infinity for slurmd, PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    has_network = node.efa.adapters > 0 or node.efa.cards > 0
    return Finding("limit on locked memory", is_free, detail, fix, has_network)


def _needrestart(node: Node) -> Iterator[Finding]:
    """Judge needrestart, which may restart slurmd and munge under a job after a library update."""
    found = node.needrestart
    restarts = found.mode == "a" or (found.ubuntu and not found.mode)
    if not found.there or not restarts or found.exempt:
        state = "leaves Slurm's daemons alone" if found.exempt else "does not restart by itself"
        yield Finding("needrestart", True, state if found.there else "not there")
        return
    why = "$nrconf{restart} is 'a'" if found.mode else "apt calls it in Ubuntu's mode"
    fix = "`$nrconf{override_rc}{qr(^(slurm|munge))} = 0;` in /etc/needrestart/conf.d/slurm.conf"
    detail = f"restarts daemons after an update, below a job too: {why}"
    yield Finding("needrestart", False, detail, fix, needed=False)


def _shared(node: Node, asked: Asked) -> Iterator[Finding]:
    """Judge whether the files made here are on the node, with the same content."""
    for number, (folder, digest) in enumerate(zip(asked.folders, asked.digests, strict=True)):
        marker = node.markers[number] if number < len(node.markers) else None
        what, fix = (
            f"folder {folder}",
            "mount the shared file system there, or work in another folder",
        )
        if marker is None or not marker.digest:
            why = (marker.fault if marker else "") or "no answer"
            yield Finding(what, False, f"a file that was made here is not read there: {why}", fix)
        else:
            is_same = marker.digest == digest
            detail = "the same" if is_same else "another file has the name of the one made here"
            yield Finding(what, is_same, detail, fix)


def _image(node: Node, path: Path, head: Image | None) -> Seen:
    image, fault, what = node.image, node.fault("image"), f"image {path}"
    if fault or not image.read:
        fix = "copy it to a folder that all nodes see, or to each node (STAGE, launch/README.md)"
        return Seen(Finding(what, False, f"not read: {fault or 'it is empty'}", fix))
    # If time ran out and only a part was read, only the size can be compared.
    is_other = head is not None and (
        image.size != head.size or (image.read == head.read and image.digest != head.digest)
    )
    if is_other:
        fix = "one file for all: a shared folder, or copy it anew"
        return Seen(Finding(what, False, f"another file, of {image.size:,} bytes", fix))
    found = Finding(
        what,
        image.seconds < SLOW,
        f"the first {image.read / (1 << 20):.0f} MiB",
        "STAGE=FOLDER on the node's own disk, for launchers (launch/README.md)",
        needed=False,
    )
    return Seen(found, seconds=image.seconds)
