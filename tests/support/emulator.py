"""Programs of Arm on this machine: a user namespace that has an emulator of its own.

From Linux 6.7 on, what is registered in a user namespace (binfmt_misc) holds there alone, so that
this machine stays as it is. The namespace has the ids of a whole system, as engines need them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from sqshforge import platforms

PROGRAM = "qemu-aarch64-static"  # of Debian's package qemu-user-static
# AWS's Graviton 2; what it is by itself has vectors that are slow to emulate.
PROCESSOR = "neoverse-n1"
# What begins a program, and which bits of that count: an ELF file of 64 bits, to be run or a
# library, for Arm.
MAGIC = platforms.ARM.smallest_program()[: platforms.HEAD]
MASK = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe" + b"\xff" * 3
# F: the emulator is opened here, and so is there in the root of every image. P: a program keeps
# the name that it was called by.
FLAGS = "PF"
# This machine's /dev/shm may have mounts in it, which are locked there: mmdebstrap cannot bind it.
MOUNT = """\
mount -t tmpfs tmpfs /dev/shm && mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc &&
    printf %s "$RULE" > /proc/sys/fs/binfmt_misc/register && exec "$@"
"""
# Not of all ids: by that buildah knows a user namespace, and leaves out device nodes, which nobody
# can make there.
IDS = "0 0 65536\n"
TIMEOUT = 120.0  # seconds until the namespace is there


def run(
    *words: str | Path, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program where programs of Arm are emulated, as root."""
    argv = ["unshare", "--user", "--mount", "bash", "-c", 'read -r _; exec bash -c "$0" "$@"']
    with subprocess.Popen(
        [*argv, MOUNT, "bash", *words],
        cwd=cwd,
        env={**os.environ, "QEMU_CPU": PROCESSOR, "RULE": _rule(), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _give_ids(process.pid)
            out, err = process.communicate("\n", timeout=timeout)
        except BaseException:
            process.terminate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _rule() -> str:
    """What the kernel is given: how such programs begin, and what runs them."""
    emulator = shutil.which(PROGRAM)
    assert emulator is not None, f"{PROGRAM} is not installed: apt-get install qemu-user-static"
    magic, mask = ("".join(f"\\x{one:02x}" for one in some) for some in (MAGIC, MASK))
    return f":arm:M::{magic}:{mask}:{emulator}:{FLAGS}"


def _give_ids(pid: int) -> None:
    """Wait for a process to have a user namespace of its own, and give that all ids."""
    own, deadline = Path("/proc/self/ns/user").readlink(), time.monotonic() + TIMEOUT
    while Path(f"/proc/{pid}/ns/user").readlink() == own:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(IDS)
