"""Folders merged by the kernel, in a mount namespace that ends with this process.

The lowest are an image's layers, or its whole root file system; the top one is filled with the
files that enroot adds.
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

# Overlay needs at least two folders, so an empty one is added. The second mount is not built on the
# first: a folder may already be an overlay, and the kernel stacks no more than two. `read` ends
# with its standard input: however this process ends, the mounts go.
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
    """Merged folders, seen from outside of the namespace in which they are mounted."""

    place: Path
    holder: subprocess.Popen[bytes]
    folders: Sequence[Path]

    @property
    def image(self) -> Path:
        """The merge of the folders without the top one."""
        return self.place / "image"

    @property
    def top(self) -> Path:
        """The top folder: fill it before `merge`, and do not change it afterwards."""
        return self.place / "top"

    @property
    def layers(self) -> Sequence[Path]:
        """The folders that `merge` merges, highest first."""
        return (self.top, *reversed(self.folders))

    def merge(self) -> Path:
        """Merge `image` with `top`; return the folder of the merge."""
        self._go_on()
        self.await_mount()
        return self.place / "root"

    def unmerge(self) -> None:
        """Unmount the merge without waiting: after much was read from it, that takes time."""
        self._go_on()

    def _go_on(self) -> None:
        assert self.holder.stdin is not None
        self.holder.stdin.write(b"\n")
        self.holder.stdin.flush()

    def close(self) -> None:
        """End the mounts."""
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        self.holder.wait()

    def await_mount(self) -> None:
        """Wait until the holder has mounted; raises `WorkError` with its message if it cannot."""
        assert self.holder.stdout is not None and self.holder.stderr is not None
        if self.holder.stdout.readline() != b"mounted\n":
            said = self.holder.stderr.read().decode(errors="replace").strip()
            raise WorkError(f"the image's layers cannot be mounted: {said}", where=str(self.place))


@contextmanager
def mounted(folders: Sequence[Path], work: Path, programs: Programs) -> Iterator[Stack]:
    """Merge folders, the lowest first, for the length of a block.

    The mounts are on `work`, in a namespace of their own: no other process sees them, and they end
    with this process, however that ends. A folder `layers` is made beside `work`. An ordinary user
    needs a kernel that lets users mount overlays (5.11), and must own the files that are read.
    Raises `WorkError` if the folders cannot be mounted.
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
    """Make short links to folders: overlay's options must fit into a page of memory."""
    links.mkdir()
    (links / "none").mkdir()
    (links / "top").symlink_to(top)
    for index, folder in enumerate(reversed(folders)):
        (links / str(index)).symlink_to(folder)
    return ":".join(("none", *map(str, range(len(folders)))))
