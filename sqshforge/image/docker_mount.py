"""Layers of docker's that only root can read and mount, for an ordinary user in docker's group.

Who may start containers is as good as root, but no process of theirs is. A container of the very
image does the two things that take root, with the few capabilities that those need: it gives a
user namespace of ours all uids and gids there are, and it mounts the layers in it. Our process
steps into that namespace. There it is what it was, on the disk and for a file server too, and
may read what root may.

Nothing in the image is run: the container has the machine's root folder, and starts the machine's
own programs in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqshforge.errors import MissingError
from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.image import overlay, temporary

# To read what belongs to others, to write the maps of a namespace, to step into one, to mount.
CAPABILITIES = (
    "DAC_OVERRIDE",
    "SETUID",
    "SETGID",
    "SETFCAP",
    "SYS_PTRACE",
    "SYS_CHROOT",
    "SYS_ADMIN",
)
UNCONFINED = ("seccomp=unconfined", "apparmor=unconfined", "label=disable")
MACHINE = "/machine"  # this machine's root folder, in the container
# The image's own variables must not lead the machine's programs astray.
VARIABLES = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LD_LIBRARY_PATH=", "LD_PRELOAD=")
NOBODY = 0xFFFFFFFF  # the number that is no uid
# $1 is a process, seen as the daemon's machine sees it: it may be another one's there.
SCRIPT = """\
set -e
seen="$(cat /proc/sys/kernel/random/boot_id) $(readlink "/proc/$1/ns/user" || :)"
if [ "$seen" != "$2" ]; then
    echo "its daemon runs elsewhere" >&2
    exit 1
fi
printf "$3" > "/proc/$1/uid_map"
printf "$4" > "/proc/$1/gid_map"
process=$1
shift 4
exec nsenter --target "$process" --mount "$@"
"""


@contextmanager
def mounted(
    image: str,
    folders: Sequence[Path],
    volumes: Sequence[str],
    client: Path,
    programs: Programs,
) -> Iterator[overlay.Stack]:
    """Merge an image's layers, the lowest first, for the length of a block.

    `volumes` are the folders that the image declares as such. From then on, and after the block
    too, this process is root of a user namespace, in which all ids are what they are outside, but
    for its own and root's, which are exchanged. Raises `MissingError` with the reason, and leaves
    all as it was, where that cannot be: the daemon is on another machine, or has itself not root's
    rights; it refuses such containers; this machine gives its users no namespaces.
    """
    if threading.active_count() > 1:
        raise MissingError("threads are at work, which cannot follow into a namespace")
    _require_local(client, programs)
    pipe = subprocess.PIPE
    with (
        temporary.folder() as place,
        rootless.holder(["unshare", "--user", "--mount"], programs) as holder,
        programs.start(
            [*_container(image, volumes, client), *_task(holder, folders, place)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        ) as container,
    ):
        stack = overlay.Stack(Path(f"/proc/{holder.name}/root{place}"), container)
        said = stack.refusal()
        if said is not None:
            raise MissingError(said.splitlines()[0] if said else "no reason given")
        rootless.join(holder)
        yield stack
        stack.close()


def exchanged(own: int) -> str:
    """The map of a namespace (user_namespaces(7)) of all ids, root's and one's own exchanged."""
    if own == 0:
        return f"0 0 {NOBODY}\n"
    ranges = [(0, own, 1), (1, 1, own - 1), (own, 0, 1), (own + 1, own + 1, NOBODY - own - 1)]
    return "".join(f"{inside} {outside} {n}\n" for inside, outside, n in ranges if n)


def _require_local(client: Path, programs: Programs) -> None:
    """A daemon elsewhere is not asked to start anything."""
    words: list[str | Path] = [client, "context", "inspect", "--format"]
    asked = programs.attempt([*words, "{{.Endpoints.docker.Host}}"])
    host = asked.out.strip()
    if asked.code != 0 or not host.startswith("unix://"):
        raise MissingError(f"its daemon runs elsewhere{f' ({host})' if host else ''}")


def _container(image: str, volumes: Sequence[str], client: Path) -> list[str | Path]:
    """The words that start a program of this machine as root, in its root folder.

    Docker would fill a volume for each of the image's `volumes` with what the image has there;
    where something else is mounted it does not.
    """
    loader, libraries = _loader()
    argv: list[str | Path] = [client, "run", "--rm", "--interactive", "--name", temporary.name()]
    argv += ["--pull", "never", "--runtime", "runc", "--log-driver", "none", "--network", "none"]
    argv += ["--pid", "host", "--userns", "host", "--user", "0:0", "--workdir", "/"]
    argv += ["--cap-drop", "ALL", *(f"--cap-add={name}" for name in CAPABILITIES)]
    argv += [f"--security-opt={one}" for one in UNCONFINED]
    argv += [f"--env={one}" for one in VARIABLES]
    argv += [f"--tmpfs={place}" for place in volumes]
    argv += ["--volume", f"/:{MACHINE}", "--entrypoint", f"{MACHINE}{loader}", image]
    # The loader is told where this machine's libraries are, as the image's may be other ones.
    return [*argv, "--library-path", libraries, f"{MACHINE}{_chroot()}", MACHINE]


def _task(holder: Path, folders: Sequence[Path], place: Path) -> list[str | Path]:
    """The words of what is done there for a process, named by its folder in /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = f"{boot} {(holder / 'ns/user').readlink()}"
    maps = exchanged(os.getuid()), exchanged(os.getgid())
    argv: list[str | Path] = ["sh", "-c", SCRIPT, "sqshforge", holder.name, seen, *maps]
    return [*argv, *overlay.shell(folders, place)]


def _loader() -> tuple[str, str]:
    """The loader of this machine's programs, and the folders of their libraries."""
    files = set(re.findall(r"\s(/\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    loaders = [file for file in files if re.match(r"ld[-.]\S*\.so", Path(file).name)]
    if not loaders:
        raise MissingError("this Python does not tell where the machine's libraries are")
    found = [file for file in files if re.match(r"libc[.-]", Path(file).name)] + loaders
    return loaders[0], ":".join(sorted({f"{MACHINE}{Path(file).parent}" for file in found}))


def _chroot() -> Path:
    found = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        raise MissingError("there is no chroot")
    return Path(found).resolve()
