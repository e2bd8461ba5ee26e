"""Run Arm programs on this machine, in a user namespace with an emulator of its own.

From Linux 6.7 on, binfmt_misc registrations made in a user namespace apply only there, so this
machine stays as it is. The namespace has the ids of a whole system, which engines need.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from sqshforge import platforms

PROGRAM = "qemu-aarch64-static"  # from Debian's package qemu-user-static
# AWS's Graviton 2; the default processor has vectors that are slow to emulate.
PROCESSOR = "neoverse-n1"
# How a program begins, and which bits of that count: a 64-bit ELF file for Arm, executable or
# library.
MAGIC = platforms.ARM.smallest_program()[: platforms.HEAD]
MASK = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe" + b"\xff" * 3
# F: the emulator is opened at registration, so it works in the root of every image. P: a program
# keeps the name that it was called by.
FLAGS = "PF"
# Mounts in this machine's /dev/shm would be locked there, and mmdebstrap could not bind it.
MOUNT = """\
mount -t tmpfs tmpfs /dev/shm && mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc &&
    printf %s "$RULE" > /proc/sys/fs/binfmt_misc/register && exec "$@"
"""
# Not all ids: by that, buildah recognizes a user namespace and leaves out device nodes, which
# nobody can make there.
IDS = "0 0 65536\n"
TIMEOUT = 120.0  # seconds until the namespace exists


def run(
    *words: str | Path, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program as root where Arm programs are emulated."""
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
    """Return the rule for the kernel: how such programs begin, and what runs them."""
    emulator = shutil.which(PROGRAM)
    assert emulator is not None, f"{PROGRAM} is not installed: apt-get install qemu-user-static"
    magic, mask = ("".join(f"\\x{one:02x}" for one in some) for some in (MAGIC, MASK))
    return f":arm:M::{magic}:{mask}:{emulator}:{FLAGS}"


def _give_ids(pid: int) -> None:
    """Wait until a process has its own user namespace, and map all ids into it."""
    own, deadline = Path("/proc/self/ns/user").readlink(), time.monotonic() + TIMEOUT
    while Path(f"/proc/{pid}/ns/user").readlink() == own:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(IDS)
