"""A small disk for a single test: a tmpfs that only processes in a mount namespace see."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import warm
from tests.support.mounts import entering, mounting
from tests.training.support.runs import COLD, ROOT, command, kill_tree


@dataclass(frozen=True)
class Disk:
    """A disk mounted at `path` for what `run` starts; from outside it is seen at `seen`."""

    path: Path
    seen: Path
    enter: Sequence[str]

    @property
    def python(self) -> Mapping[str, str]:
        """The interpreter's variables: only root's namespaces can be entered by a warm one."""
        return warm.python() if os.geteuid() == 0 else COLD

    def resize(self, size: str) -> None:
        mount = ("mount", "-o", f"remount,size={size}", str(self.path))
        subprocess.run([*self.enter, *mount], check=True)

    def run(
        self, command: Sequence[str], to: str = "", timeout: float = 180
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; `to` is a file on the disk that gets its standard output."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.python}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            env.pop(name, None)
        redirected = ("sh", "-c", f'exec "$@" > {to}', "sh") if to else ()
        process = subprocess.Popen(
            [*self.enter, *redirected, *command],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            kill_tree(process)
            process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def train(
        self, ranks: int, *flags: str, program: Sequence[str] = (), to: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the entry point, or another program, on `ranks` ranks to its end."""
        python = self.python["PYTHON_EXEC"]
        return self.run(command(ranks, *flags, program=program, python=python), to)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Disk]:
    """Mount a disk; it is unmounted with the process that holds the namespace, or with the test."""
    path.mkdir()
    script = 'mount -t tmpfs -o size="$1" tmpfs "$0" && echo ready && exec sleep infinity'
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *mounting(), "sh", "-c", script, path, size],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        seen = Path(f"/proc/{holder.pid}/root{path}")
        yield Disk(path, seen, entering(holder.pid))
    finally:
        holder.kill()
        holder.communicate()
