"""Set up a container: the steps between the new mount namespace and the image's /etc/rc.

This module runs as a small program in that namespace and ends by becoming the command. All mounts
are in the namespace, so they go with the last process in it, however that ends.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sqshforge import platforms
from sqshforge.errors import RequestError, SqshforgeError, WorkError
from sqshforge.host import syscalls
from sqshforge.host.programs import Programs
from sqshforge.host.rootpath import folder, inside, text, unescape
from sqshforge.run import account, gpu_driver, passed, supervisor
from sqshforge.run.supervisor import Supervisor

PROGRAMS = Programs()

FROM_HOST = ("hosts", "hostname", "resolv.conf", "machine-id")
OF_HOST = ("/proc", "/sys", "/dev")  # bound as they are: files made there are made on the host
NO_EFFECT = "nosuid,nodev"  # disable devices and set-user-id programs of the image
FLAGS = {
    "ro": syscalls.MS_RDONLY,
    "nosuid": syscalls.MS_NOSUID,
    "nodev": syscalls.MS_NODEV,
    "noexec": syscalls.MS_NOEXEC,
    "nosymfollow": syscalls.MS_NOSYMFOLLOW,
}
# Errors of a mount in a folder that the caller may not enter (/sys/kernel/debug, for a user), or
# that another mount hides: the command cannot reach it either.
OUT_OF_REACH = (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
OWN = "${ENROOT_ROOTFS}"  # the start of a volume's source in fstab


def merged_environment(
    host: Mapping[str, str], image: str, asked: Mapping[str, str]
) -> dict[str, str]:
    """Merge as enroot does: the image's /etc/environment overrides the host, `asked` both.

    Of the host's variables, only those that go into every container (`passed`) override the
    image's. `${NAME}` in the image's file is replaced by the host's value, or by nothing.
    PYTHONHOME is dropped: a module system sets it for the host's Python, and it would keep the
    image's from starting.
    """
    merged = {name: value for name, value in host.items() if name != "PYTHONHOME"}
    for line in image.split("\n"):
        name, separator, value = line.partition("=")
        if separator and name and not name.startswith("#"):
            merged[name] = re.sub(r"\$\{(\w+)\}", lambda found: host.get(found[1], ""), value)
    return {**merged, **{name: host[name] for name in passed.names(host)}, **asked}


def mount_root(
    image: Path,
    supervisor: Supervisor,
    *,
    as_root: bool,
    fuse: bool | None,
    log: Path | None = None,
) -> Path:
    """Mount the image and a writable layer below the supervisor's place; return the merged root.

    With a `log`, squashfuse mounts the file and logs each call that it answers there.
    """
    place = supervisor.place
    if re.search(r"[:,\\]", str(place)):  # these are special in overlay's options
        raise RequestError(
            f"TMPDIR: {place.parent} has a colon, a comma or a backslash in its name, and a "
            "container cannot be mounted there",
            fix="TMPDIR=/tmp, or another folder",
        )
    mount_program("-t", "tmpfs", "-o", "mode=0755", "sqshforge", place)
    lower, upper, work, root = (place / name for name in ("lower", "upper", "work", "root"))
    for one in (lower, upper, work, root):
        one.mkdir()
    others = ["-o", "allow_other"] if as_root else []
    if log is not None:
        supervisor.serve([_squashfuse_with_paths(), "-f", "-d", *others, image, lower], lower, log)
    elif not as_root:
        supervisor.serve([_squashfuse(), "-f", image, lower], lower)
    elif fuse or not _mounted_by_kernel(image, lower, required=fuse is False):
        supervisor.serve([_squashfuse(), "-f", *others, image, lower], lower)
    upper.chmod(lower.stat().st_mode & 0o7777)  # the merged root has the mode of its upper layer
    layers = f"{NO_EFFECT},lowerdir={lower},upperdir={upper},workdir={work}"
    if as_root:
        mount_program("-t", "overlay", "-o", layers, "overlay", root)
    elif _overlay_is_enough(image, lower, upper):
        mount_program("-t", "overlay", "-o", f"{layers},userxattr", "overlay", root)
    else:
        overlay = PROGRAMS.require("fuse-overlayfs", "it makes a root writable for a user")
        supervisor.serve([overlay, "-f", "-o", f"{layers},squash_to_root", root], root)
    return root


def mount_program(*words: str | Path) -> None:
    PROGRAMS.capture(["mount", *words])


def make_read_only(place: Path) -> None:
    """Make a bind mount and all mounts below it read-only.

    Their other options stay: a user namespace may not drop those that the host has set.
    """
    flags = _mounts()
    syscalls.remount_bind(place, flags.get(place, 0) | syscalls.MS_RDONLY)
    for point in (one for one in flags if place in one.parents):
        try:
            syscalls.remount_bind(point, flags[point] | syscalls.MS_RDONLY)
        except OSError as error:
            if error.errno not in OUT_OF_REACH:
                raise


def _mounts() -> dict[Path, int]:
    """The flags of each mount by its mount point; of several at one point, those of the topmost."""
    found = {}
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")[:-1]:
        fields = line.split(" ")
        found[Path(unescape(fields[4]))] = _flags(fields[5])
    return found


def _flags(options: str) -> int:
    return sum(FLAGS.get(option, 0) for option in set(options.split(",")))


def _mounted_by_kernel(image: Path, lower: Path, *, required: bool) -> bool:
    try:
        mount_program("-t", "squashfs", "-o", f"loop,ro,{NO_EFFECT}", image, lower)
    except WorkError:
        if required:
            raise
        return False  # no loop devices, or a kernel without squashfs or its zstd
    return True


def _overlay_is_enough(image: Path, lower: Path, upper: Path) -> bool:
    """Whether the kernel's overlay works for a user; it reads twice as fast as fuse-overlayfs.

    To remove a folder and make it again, it needs user.* attributes on the layer in memory, which
    Linux has since 6.6. And all files must be the user's: it cannot change those of other owners.
    """
    try:
        os.setxattr(upper, "user.sqshforge", b"")
        os.removexattr(upper, "user.sqshforge")
    except OSError:
        return False
    with image.open("rb") as file:
        owners = int.from_bytes(file.read(28)[26:], "little")  # the superblock's no_ids
    return owners == 1 and lower.stat().st_uid == 0


def _squashfuse() -> Path:
    return PROGRAMS.which("squashfuse_ll") or PROGRAMS.require("squashfuse")


def _squashfuse_with_paths() -> Path:
    """The squashfuse whose messages name files by path; squashfuse_ll gives only numbers."""
    return PROGRAMS.require("squashfuse", "it tells which files a start reads")


@dataclass(frozen=True)
class Plan:
    """What to start, as decided by the outer process."""

    image: str
    command: tuple[str, ...]
    mounts: tuple[tuple[str, str, bool], ...]  # (source, target, read-only)
    environment: Mapping[str, str]  # the requested variables; the host's are this process's own
    uid: int
    gid: int
    fuse: bool | None
    log: str | None = None  # the file in which squashfuse logs its calls


def main(plan_without_command: str, *command: str) -> NoReturn:
    """Set up the container and become its command; on failure print a short error and exit."""
    supervisor.close_all_but(_handed_on(os.environ))
    passed.forget_coerced()
    plan = Plan(command=command, **json.loads(plan_without_command))
    try:
        _become_command(plan)
    except (
        OSError,
        ValueError,
        SqshforgeError,
    ) as error:  # ValueError: a NUL in a path, a variable
        failure = _failure(error, plan)
        print("\n".join(failure.lines()), file=sys.stderr)
        sys.exit(failure.exit_code)


def _handed_on(environment: Mapping[str, str]) -> set[int]:
    """The descriptors that the command gets: the standard streams and a process manager's socket.

    With PMI-1 and PMI-2, Slurm gives each rank such a socket. The caller's other open files are not
    for the image.
    """
    number = environment.get("PMI_FD", "")
    return {0, 1, 2, int(number) if re.fullmatch("[0-9]{1,9}", number) else 0}


def _failure(error: OSError | ValueError | SqshforgeError, plan: Plan) -> SqshforgeError:
    if isinstance(error, SqshforgeError) and error.fix:
        return error
    reason = error.what if isinstance(error, SqshforgeError) else str(error)
    return WorkError(f"the container cannot be set up: {reason}", where=plan.image)


def _become_command(plan: Plan) -> NoReturn:
    umask = os.umask(0o022)  # files of the set-up are for all users of the container
    beside = supervisor.start()
    log = Path(plan.log) if plan.log else None
    root = mount_root(Path(plan.image), beside, as_root=plan.uid == 0, fuse=plan.fuse, log=log)
    # The set-up, and all programs that it calls, use the host's environment: the image's PATH or
    # LD_LIBRARY_PATH is not for them.
    of_image = text(root, "/etc/environment")
    environment = merged_environment(os.environ, of_image, plan.environment)
    home = environment.get("HOME", "")
    home = home if home.startswith("/") else "/"
    _own_files(root, plan, home)
    # Read the image's files before anything of the host is bound: a link of the image in place of a
    # file must not lead into the host's /proc.
    shell = account.login_shell(root, plan.uid)
    umask = account.login_umask(root, plan.uid, umask)
    fstab = text(root, "/etc/fstab")
    bound = _bind_host(root, home)
    # As for enroot's hook, the host's variables override the image's.
    asked = {**environment, **os.environ, **plan.environment}
    gpu_driver.bring_driver(root, asked, PROGRAMS)
    _volumes(root, fstab, bound)
    _mounts_asked(root, plan, bound)
    syscalls.pivot(root)
    beside.set_up()
    if plan.uid != 0:
        syscalls.become(plan.uid, plan.gid)
    argv = _start_words(plan, shell, home)
    os.umask(umask)
    syscalls.forbid_new_privileges()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and the command inherits that
    try:
        os.execve(argv[0], [f"-{Path(argv[0]).name}", *argv[1:]], environment)
    except OSError as error:
        raise _of_another_machine(Path(argv[0]), plan) or error from None


def _of_another_machine(program: Path, plan: Plan) -> RequestError | None:
    """The error for a program of the image that is for another machine; None if it is not."""
    try:
        with program.open("rb") as file:
            built_for = platforms.of_program(file.read(platforms.HEAD))
    except OSError:
        return None
    if built_for in ("", platforms.own()):
        return None
    return platforms.not_for_this_machine(plan.image, built_for)


def _own_files(root: Path, plan: Plan, home: str) -> None:
    """Put the host's names and the caller's account into the container's own files."""
    etc = folder(root, "/etc")
    for name in FROM_HOST:
        source, target = Path("/etc") / name, etc / name
        if source.exists():
            # Replace it: in an image it is often a dangling link, which cannot be written through.
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)
    account.add(root, plan.uid, plan.gid, home)


def _bind_host(root: Path, home: str) -> dict[Path, str]:
    """Bind the host's folders, and make an empty /tmp and a home folder.

    Returns the bound folders of the host by their places in the root.
    """
    bound = {folder(root, path): path for path in OF_HOST}
    temporary = folder(root, "/tmp")
    for place, path in bound.items():
        mount_program("--rbind", path, place)
        if path == "/sys":
            make_read_only(place)
    mount_program("-t", "tmpfs", "-o", f"mode=1777,{NO_EFFECT}", "tmpfs", temporary)
    if _host_folder(inside(root, home), bound) is None:
        account.make_home(root, home)
    return bound


def _host_folder(place: Path, bound: Mapping[Path, str]) -> str | None:
    """The bound host folder in which a missing place would have to be made, or None."""
    if place.exists():
        return None
    return next((path for one, path in bound.items() if place.is_relative_to(one)), None)


def _volumes(root: Path, fstab: str, bound: Mapping[Path, str]) -> None:
    """Bind the volumes in the image's /etc/fstab as enroot writes it: folders of the root itself.

    Only blanks and tabs separate its fields, fstab(5). Volumes that would involve the host are left
    out with a warning.
    """
    for line in fstab.split("\n"):
        fields = [unescape(field) for field in re.split("[ \t]+", line.strip(" \t"))]
        if len(fields) < 4 or fields[0].startswith("#") or "bind" not in fields[3].split(","):
            continue
        source, target = inside(root, fields[0].removeprefix(OWN)), inside(root, fields[1])
        is_host = not fields[0].startswith(OWN)
        if is_host or _host_folder(source, bound) or _host_folder(target, bound):
            print(
                f"warning: left out, as it is the host's: the image's volume {fields[0]!r} at "
                f"{fields[1]!r}\n  fix:   --mount SOURCE:TARGET, if you want it there",
                file=sys.stderr,
            )
            continue
        for one in (source, target):
            one.mkdir(parents=True, exist_ok=True)
        mount_program("--bind", source, target)
        syscalls.remount_bind(target, _mounts().get(target, 0) | _flags(fields[3]))


def _mounts_asked(root: Path, plan: Plan, bound: Mapping[Path, str]) -> None:
    """Bind the paths that --mount names.

    Raises `WorkError` if a target would have to be made on the host, `RequestError` if source and
    target do not fit.
    """
    before: list[tuple[Path, Path, str]] = []  # the place, name and source of each earlier mount
    for source, target, read_only in plan.mounts:
        place, name = inside(root, target), Path(os.path.normpath("/" + target.lstrip("/")))
        # A target may lie in an earlier mount by its name, which the user wrote, but not because a
        # link of the image leads there.
        by_link = {at: of for at, named, of in before if not name.is_relative_to(named)}
        host = _host_folder(place, {**by_link, **bound})
        if host is not None:
            raise WorkError(
                f"the mount target {target} is inside the host's {host} and does not exist"
            )
        _require_fit(Path(source), place, target, root)
        _bind(Path(source), place, read_only)
        before.append((place, name, source))


def _require_fit(source: Path, place: Path, target: str, root: Path) -> None:
    """Raise `RequestError` for a file over a folder, a folder over a file, or anything over /."""
    if place == root:
        raise RequestError(
            f"{target} is all of the container, which {source} would hide",
            where="--mount",
            fix=f"--mount {source}:/mnt",
        )
    kinds = {True: "a folder", False: "no folder"}
    if place.exists() and place.is_dir() != source.is_dir():
        raise RequestError(
            f"{source} is {kinds[source.is_dir()]}, and {target} in the image is "
            f"{kinds[place.is_dir()]}",
            where="--mount",
            fix=f"name another target, as {target.rstrip('/')}/{source.name}"
            if place.is_dir()
            else "name another target",
        )


def _bind(source: Path, place: Path, read_only: bool) -> None:
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.touch()
    mount_program("--rbind", source, place)
    if read_only:
        make_read_only(place)


def _start_words(plan: Plan, shell: str, home: str) -> list[str]:
    """The arguments of the login shell that runs /etc/rc with the command.

    An image without /etc/rc starts the command, or a shell, in the home folder.
    """
    if Path("/etc/rc").is_file():
        return [shell, "/etc/rc", *plan.command]
    os.chdir(home)
    return [shell, "-c", 'exec "$@"', shell, *plan.command] if plan.command else [shell]
