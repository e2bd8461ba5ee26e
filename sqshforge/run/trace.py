"""Trace which files of a sqsh a start reads, in the order of their first use.

squashfuse mounts the file and logs every call that it answers (`-d`). The kernel asks it only for
pages that a process reads or maps and that were not read before. So the list has the files that are
read, not only opened, by all processes of the container, however they are linked. This needs what
the built-in runtime needs for an ordinary user anyway, and no more for root. strace and ptrace see
system calls but no page faults, and slow each call down; fanotify is for root only.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sqshforge.errors import RequestError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.run import start
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.image import open_image
from sqshforge.squashfs.inode import FILE

RECIPE = b"sqshforge/meta/recipe.yaml"
MOST = 1 << 20  # bytes read of a recipe
# A file larger than LARGE bytes of which a start reads less than SHARE is not hot: hot files are
# read ahead whole, and of CUDA's libraries, 2.3 GB, a start without a GPU reads 3 percent.
LARGE, SHARE = 32 << 20, 0.1
LAST = 12  # lines of a failed command's output that the error shows
# Messages of libfuse 2.9 and 3: a file was opened under a number; so many bytes of it were read.
OPENED = re.compile(rb" +open\[(\d+)\] flags: 0x[0-9a-f]+ /(.*)\n")
READ = re.compile(rb" +read\[(\d+)\] ([1-9]\d*) bytes from (\d+)\n")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Its data must not add files that a start would not read: the training code is never listed.
FIRST_STEP = (
    *("python3", "-m", "training.mamba_fsdp", "--dataset_path=text:/sqshforge/training/*.py"),
    *("--seq_length=128", "--batch_size=1", "--num_steps=2", "--save_ckpt_path=/tmp/trace"),
)


class Read(NamedTuple):
    """A read of a file's content; the path is relative to the root, offset and size in bytes."""

    path: bytes
    offset: int
    size: int


@dataclass(frozen=True)
class Trace:
    """The reads of one start, in order; each page occurs once, because the kernel caches it."""

    reads: tuple[Read, ...]

    @property
    def paths(self) -> tuple[bytes, ...]:
        """The files, the first used first."""
        return tuple(dict.fromkeys(one.path for one in self.reads))

    @property
    def size(self) -> int:
        """The bytes read."""
        return sum(one.size for one in self.reads)

    def hot(self, sizes: Mapping[bytes, int]) -> tuple[bytes, ...]:
        """The files worth reading ahead, the first used first; `sizes` are their bytes.

        These are all except large files of which little was read.
        """
        read: Counter[bytes] = Counter()
        for one in self.reads:
            read[one.path] += one.size
        return tuple(
            path
            for path in self.paths
            if (size := sizes.get(path, 0)) <= LARGE or read[path] >= SHARE * size
        )


def trace(image: Path, command: Sequence[str], programs: Programs, reporter: Reporter) -> Trace:
    """Run a command in a sqsh with the built-in runtime and record which files it reads.

    Raises `RequestError` if the file is not a sqsh, `MissingError` if squashfuse is missing or may
    not mount, `WorkError` if the command fails: its list would lack the files that come after.
    """
    image = image.absolute()
    start.require_sqsh(image)
    with tempfile.NamedTemporaryFile(prefix="sqshforge-trace-") as log:
        argv = start.traced_command(image, command, log.name, programs)
        said: deque[str] = deque(maxlen=LAST)
        with (
            reporter.track(f"trace a start of {image.name}") as tracker,
            programs.start(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as process,
        ):
            assert process.stdout is not None
            for raw in process.stdout:
                said.append(raw.decode(errors="replace").rstrip())
                tracker.note(said[-1])
            code = process.wait()
        if code != 0:
            raise WorkError(
                f"the command ended with exit code {code}, so no list was written"
                + "".join(f"\n    {line}" for line in said),
                where=f"{' '.join(command)}, inside {image}",
            )
        return read_log(log)


def sizes(image: Path) -> dict[bytes, int]:
    """The bytes of each file of a sqsh, by path."""
    with open_image(image) as opened:
        return {path: one.size for path, one in opened.entries.items() if one.kind == FILE}


def read_log(lines: Iterable[bytes]) -> Trace:
    """Parse libfuse's messages for the reads of files."""
    names: dict[bytes, bytes] = {}  # paths of open files by their numbers, which are reused
    found = []
    for line in lines:
        if match := OPENED.fullmatch(line):
            names[match[1]] = match[2]
        elif (match := READ.fullmatch(line)) and match[1] in names:
            found.append(Read(names[match[1]], int(match[3]), int(match[2])))
    return Trace(tuple(found))


def default_command(image: Path) -> tuple[str, ...]:
    """The first steps of the training, or the imports, of the smoke test in a sqsh's recipe.

    Raises `RequestError` if it has neither.
    """
    with open_image(image) as opened:
        entry = opened.find(RECIPE)
        text = b""
        if entry is not None and entry.kind == FILE:
            text = Content(opened).read(entry, MOST)
    try:
        recipe = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        recipe = None
    command = start_command(recipe if isinstance(recipe, dict) else {})
    if not command:
        raise RequestError(
            "the image has no recipe, so there is no smoke test to start",
            where=str(image),
            fix=f"name a command: sqshforge trace {shlex.quote(str(image))} -- COMMAND",
        )
    return command


def start_command(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """Two steps of the training in a recipe's smoke test, else its imports; empty without both.

    Two, because the first step does not show what a step after the optimizer's first one needs.
    """
    smoke = recipe.get("smoke")
    smoke = smoke if isinstance(smoke, dict) else {}
    train = smoke.get("train")
    if isinstance(train, dict) and isinstance(train.get("model_name"), str):
        return (*FIRST_STEP, f"--model_name={train['model_name']}")
    imports = smoke.get("imports")
    names = imports if isinstance(imports, list) else []
    modules = [name for name in names if isinstance(name, str) and MODULE.fullmatch(name)]
    return ("python3", "-c", f"import {', '.join(modules)}") if modules else ()
