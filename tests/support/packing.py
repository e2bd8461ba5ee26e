"""A tree and an image that take a while to pack, and the command line that packs them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host import rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image.address import parse
from sqshforge.squash import pack as squash
from tests.support import odd_root, processes

QUIET = Reporter(quiet=True)
FAST = squash.Options.of("fast")
MARK = "SQSHFORGE_TEST_PACKER"


@pytest.fixture(name="tree", scope="module")
def tree_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system that takes the archive profile a few seconds."""
    folder = tmp_path_factory.mktemp("slow") / "tree"
    (folder / "etc").mkdir(parents=True)
    for index in range(24):
        words = os.urandom(2 << 20).hex()
        (folder / f"words-{index}").write_text(words)
    return folder


@pytest.fixture(name="image", scope="module")
def image_fixture(tree: Path) -> Iterator[str]:
    """The address of the same tree as a buildah image."""
    odd_root.tar(tree, tree.parent / "rootfs.tar")
    (tree.parent / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    (tree.parent / ".dockerignore").write_text("tree\n")
    with odd_root.in_buildah(tree.parent) as name:
        yield f"buildah://{name}"


def pack(image: str, output: Path, options: squash.Options = FAST) -> squash.Packed:
    programs = Programs()
    source = parse(image, programs)
    return rootless.call_as_root(
        lambda: squash.pack(source, output, options, programs, QUIET), image, programs
    )


def visible(folder: Path) -> set[str]:
    """Return what is in a folder, except for the lock, which stays and is empty."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


@contextlib.contextmanager
def started(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command line in the background; nothing that it starts outlives the block."""
    environment = {**os.environ, MARK: str(id(words)), "COLUMNS": "1000"}
    environment["PYTHONFAULTHANDLER"] = "1"  # for `ended`
    argv = [sys.executable, "-m", "sqshforge", "pack", *map(str, words)]
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            processes.kill(processes.having({MARK: environment[MARK]}))


def ended(process: subprocess.Popen[str], seconds: float = 300) -> int:
    """Wait for a command's end; returns the exit code. If it hangs, fails and shows where."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        below = [processes.command(pid) for pid in processes.descendants(process.pid)]
        process.send_signal(signal.SIGABRT)
        _, err = process.communicate(timeout=120)
        pytest.fail(f"still running: {below}\n{err}")


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    with started(*words) as process:
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)
