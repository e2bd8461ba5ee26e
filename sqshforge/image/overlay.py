"""Folders merged by the kernel, in a mount namespace that ends with us.

The lowest are an image's layers, or its whole root file system; on top lies one that we fill
with what enroot adds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs

# Overlay asks for two folders at least, so an empty one is added. The second mount is not made of
# the first, as a folder may be an overlay already and the kernel stacks no more than two. `read`
# ends when its standard input does: however we end, the mounts are gone.
SCRIPT = """\
set -e
mount -t tmpfs -o mode=0755 sqshforge "$1"
mkdir "$1/image" "$1/top" "$1/root"
cd "$2"
mount -t overlay -o "ro,lowerdir=$3" overlay "$1/image"
echo mounted
read -r _
mount -t overlay -o "ro,lowerdir=top:$3" overlay "$1/root"
echo mounted
read -r _ || exit 0
umount "$1/root"
read -r _ || :
"""


@dataclass(frozen=True)
class Stack:
    """Merged folders, seen from outside of the namespace they are mounted in."""

    place: Path
    holder: subprocess.Popen[bytes]
    folders: Sequence[Path]

    @property
    def image(self) -> Path:
        """What the folders are without the one on top."""
        return self.place / "image"

    @property
    def top(self) -> Path:
        """The folder on top: to be filled before `merge`, and left alone after it."""
        return self.place / "top"

    @property
    def layers(self) -> Sequence[Path]:
        """The folders that `merge` merges, the highest first."""
        return (self.top, *reversed(self.folders))

    def merge(self) -> Path:
        """Merge `image` with `top`; the folder where that can be read."""
        self._go_on()
        self.await_mount()
        return self.place / "root"

    def unmerge(self) -> None:
        """Let what `merge` gave go, and do not wait: all that was read of it takes its time."""
        self._go_on()

    def _go_on(self) -> None:
        assert self.holder.stdin is not None
        self.holder.stdin.write(b"\n")
        self.holder.stdin.flush()

    def close(self) -> None:
        """Let the mounts go."""
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        self.holder.wait()

    def await_mount(self) -> None:
        """Wait until the holder has mounted; `WorkError` with its words where it cannot."""
        assert self.holder.stdout is not None and self.holder.stderr is not None
        if self.holder.stdout.readline() != b"mounted\n":
            said = self.holder.stderr.read().decode(errors="replace").strip()
            raise WorkError(f"the image's layers cannot be mounted: {said}", where=str(self.place))


@contextmanager
def mounted(folders: Sequence[Path], work: Path, programs: Programs) -> Iterator[Stack]:
    """Merge folders, the lowest first, for the length of a block.

    The mounts are on `work`, in a namespace of their own: nobody else sees them, and they end with
    this process, however that ends. Beside `work` comes a folder `layers`. An ordinary user needs a
    kernel that lets users mount (5.11), and owns what is read. Raises `WorkError` where they cannot
    be mounted.
    """
    unshare = programs.require("unshare", "it makes a mount namespace")
    argv: list[str | Path] = [unshare, "--mount", "--propagation", "private"]
    if os.geteuid() != 0:
        argv += ["--user", "--map-root-user"]
    links = work.absolute().with_name("layers")
    lower = _link(folders, links, work.absolute() / "top")
    argv += ["sh", "-c", SCRIPT, "sqshforge", work.absolute(), links, lower]
    pipe = subprocess.PIPE
    with programs.start(argv, stdin=pipe, stdout=pipe, stderr=pipe) as holder:
        stack = Stack(Path(f"/proc/{holder.pid}/root{work.absolute()}"), holder, folders)
        stack.await_mount()
        yield stack
        stack.close()


def _link(folders: Sequence[Path], links: Path, top: Path) -> str:
    """Name folders by short links: overlay's options must fit into a page of memory."""
    links.mkdir()
    (links / "none").mkdir()
    (links / "top").symlink_to(top)
    for index, folder in enumerate(reversed(folders)):
        (links / str(index)).symlink_to(folder)
    return ":".join(("none", *map(str, range(len(folders)))))
