"""A fresh machine of another Linux system: its root entered by pivot_root, with this kernel.

It has its own processes, mounts and /dev, but this machine's network, package indexes and
certificates. Nothing of it outlives the block except what `systems` keeps.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqshforge.host import syscalls
from sqshforge.host.programs import Programs
from sqshforge.network import access as host
from tests.conftest import ROOT
from tests.distros.systems import System, tar_of

USER = "user"
CLONE = "sqshforge"  # the folder of the fresh clone, in the user's home
LIMIT = 900.0  # seconds for one command
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")  # its place on Debian and Ubuntu

# $1 is the root, $2 the mode of /dev/fuse, $3 the folders of this machine that are visible inside.
ENTER = """\
set -e
root=$1 mode=$2 shared=$3
shift 3
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --rbind /sys sys
mount -t devtmpfs devtmpfs dev
mount -t tmpfs tmpfs mnt
mknod -m "$mode" mnt/fuse c 10 229
mount --bind mnt/fuse dev/fuse
umount --lazy mnt
mkdir -p dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
mount --bind dev/pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=0755 tmpfs run
mkdir -m 1777 run/lock
# What systemd-resolved makes of /etc/resolv.conf when some package brings it in.
mkdir -p run/systemd/resolve
cp /etc/resolv.conf run/systemd/resolve/stub-resolv.conf
for one in $shared; do
    mkdir -p ".$one"
    mount --bind "$one" ".$one"
    mount -o remount,bind,ro ".$one"
done
mkdir -p .old
pivot_root . .old
umount --lazy /.old
rmdir /.old
exec "$@"
"""


@dataclass(frozen=True)
class Ran:
    """How a command on the machine ended; stdout and stderr are combined."""

    code: int
    output: str
    seconds: float


@dataclass(frozen=True)
class Machine:
    """A running machine; `root` is its root folder as this machine sees it."""

    system: System
    root: Path

    def run(
        self,
        script: str,
        *,
        user: str = "root",
        fuse: str = "0666",
        limit: float = LIMIT,
        after: float | None = None,
        how: signal.Signals = signal.SIGINT,
    ) -> Ran:
        """Run lines of shell from the user's home, as a login does.

        With `after`, all processes of the command get the signal `how` after that many seconds, as
        those in the foreground of a terminal do.
        """
        argv = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        shared = " ".join(str(one) for one in _local_folders())
        argv += ["sh", "-c", ENTER, "sh", str(self.root), fuse, shared]
        inside = ["env", "-i", *_variables(), "su", "--login", *_kept(), user, "-c", script]
        started, us = time.monotonic(), os.getpid()
        with subprocess.Popen(
            [*argv, *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: syscalls.die_with_parent(signal.SIGKILL, us),
        ) as process:
            try:
                try:
                    output, _ = process.communicate(timeout=limit if after is None else after)
                except subprocess.TimeoutExpired:
                    if after is None:
                        raise
                    _signal(process, how)
                    output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                output += f"\nended after {limit:.0f} s".encode()
            except BaseException:
                process.kill()
                raise
        seconds = time.monotonic() - started
        return Ran(process.returncode, output.decode(errors="replace"), seconds)

    def add_user(self, *, sudo: bool = True) -> None:
        """Add the ordinary user, as `adduser` does on every such system."""
        made = self.run(f"useradd --create-home --shell /bin/bash {USER}")
        assert made.code == 0, made.output
        if sudo:
            rule = self.root / "etc/sudoers.d/user"
            rule.write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")
            rule.chmod(0o440)

    def clone(self, user: str) -> None:
        """Clone this checkout's last commit to `CLONE` in the user's home."""
        bundle = self.root / "tmp/sqshforge.bundle"
        Programs().capture(["git", "-C", ROOT, "bundle", "create", bundle, "HEAD"])
        bundle.chmod(0o644)
        made = self.run(f"git clone --quiet /tmp/sqshforge.bundle {CLONE}", user=user)
        assert made.code == 0, made.output
        bundle.unlink()


@contextmanager
def machine(system: System, kept: Path) -> Iterator[Machine]:
    """Run a fresh machine for the length of a block; `kept` has the roots of all systems."""
    tar = tar_of(system, kept)
    folder = Path(tempfile.mkdtemp(prefix=f"{system.name}-"))
    try:
        root = folder / "root"
        root.mkdir()
        Programs().capture(["tar", "--extract", "--numeric-owner", "-C", root, "--file", tar])
        for name in ("hosts", "resolv.conf"):
            (root / "etc" / name).unlink(missing_ok=True)
            shutil.copyfile(f"/etc/{name}", root / "etc" / name)
        _configure(root)
        yield Machine(system, root)
    finally:
        shutil.rmtree(folder)


def _configure(root: Path) -> None:
    """Give the machine this one's package indexes and certificates."""
    settings = host.pip(Programs())
    bundle = host.ca_bundle(settings)
    lines = ["[global]"]
    if bundle is not None:
        place = root / CA_BUNDLE.relative_to("/")
        shutil.copyfile(bundle, place)
        lines.append(f"cert = {CA_BUNDLE}")
    if settings.index:
        lines.append(f"index-url = {settings.index}")
    for key, values in (
        ("extra-index-url", settings.extra_indexes),
        ("find-links", settings.find_links),
        ("trusted-host", settings.trusted_hosts),
    ):
        if values:
            lines.append(f"{key} =" + "".join(f"\n    {value}" for value in values))
    (root / "etc/pip.conf").write_text("\n".join(lines) + "\n")


def _local_folders() -> list[Path]:
    """Return the folders of this machine that its pip takes packages from."""
    settings = host.pip(Programs())
    addresses = [*settings.find_links, *settings.extra_indexes, settings.index or ""]
    folders = (
        Path(one.removeprefix("file://")) for one in addresses if one.startswith(("/", "file"))
    )
    # An index may refer to files beside it.
    return sorted({one.parent if one.name == "simple" else one for one in folders})


def _variables() -> list[str]:
    """Return the variables of every process on the machine: language, certificates and proxies."""
    ca = [f"{name}={CA_BUNDLE}" for name in host.CA_VARIABLES if os.environ.get(name)]
    return ["LANG=C.UTF-8", *ca, *(f"{name}={value}" for name, value in host.proxies().items())]


def _kept() -> list[str]:
    names = ",".join(one.partition("=")[0] for one in _variables())
    return [f"--whitelist-environment={names}"]


def _signal(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Signal all processes of the machine except the first, which waits for them."""
    listed = Programs().attempt(["pgrep", "--session", str(process.pid)]).out.split()
    for pid in listed:
        if int(pid) != process.pid:
            os.kill(int(pid), how)
