"""A small root with this machine's own shell and tools, packed as a sqsh, enough for containers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from sqshforge import platforms
from sqshforge.host.programs import Programs
from sqshforge.image import enroot

TOOLS = (
    *("cat", "env", "head", "id", "ls", "mkdir", "pwd", "sed", "sleep", "stat", "touch", "tr"),
    "yes",
)


def tree(place: Path, config: enroot.ImageConfig) -> Path:
    """Make the tree, with a merged /usr as in Debian, and what packing writes into /etc."""
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "root", "tmp"):
        (place / name).mkdir(parents=True)
    for name in ("bin", "lib64"):
        (place / name).symlink_to(f"usr/{name}")
    (place / "lib").symlink_to("usr/lib")
    _install(place, "dash", "sh")
    for name in TOOLS:
        _install(place, name, name)
    (place / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (place / "etc" / "group").write_text("root:x:0:")  # as in some images: no newline at the end
    for path, content in enroot.files(config).items():
        (place / path).write_bytes(content)
    return place


def sqsh(
    place: Path,
    config: enroot.ImageConfig | None = None,
    change: Callable[[Path], object] | None = None,
    owners: tuple[str, ...] = ("-all-root",),
) -> Path:
    """Pack such a tree, after `change` to it, as PLACE.sqsh; `owners` are words for mksquashfs."""
    made = tree(place, config or enroot.ImageConfig(reference="tiny"))
    if change is not None:
        change(made)
    file = place.with_name(f"{place.name}.sqsh")
    argv: list[str | Path] = [
        "mksquashfs",
        made,
        file,
        *owners,
        "-comp",
        "zstd",
        "-no-progress",
        "-quiet",
    ]
    Programs().capture(argv)
    shutil.rmtree(made)
    return file


def of_another_machine(root: Path) -> None:
    """Change such a tree so that this machine cannot run its shell."""
    other = next(one for one in platforms.ALL.values() if not one.is_own)
    shell = root / "usr/bin/sh"
    shell.write_bytes(other.smallest_program())
    shell.chmod(0o755)


def _install(root: Path, program: str, name: str) -> None:
    """Copy a program of this machine and the libraries that the loader needs for it."""
    source = shutil.which(program, path="/usr/bin")
    assert source is not None, program
    shutil.copy(source, root / "usr" / "bin" / name)
    for library in re.findall(r"(/\S+) \(0x", Programs().capture(["ldd", source])):
        target = root / library.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(library, target)
