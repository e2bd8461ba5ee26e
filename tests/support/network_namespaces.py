"""Several machines on one: network namespaces with their own addresses and host names.

Everything made here is removed at the end of the block, even if a test fails.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_numbers = itertools.count()
SUBNETS = 255


@dataclass(frozen=True)
class Machine:
    """One machine: its host name, its address and its network namespace."""

    name: str
    address: str
    space: str  # name of the namespace; its link on the bridge has a v appended

    def enter(self, *words: str, before: str = "") -> list[str]:
        """Return a command line that runs there, in its own mounts, after some lines of shell."""
        script = f'hostname {self.name}; {before} exec "$0" "$@"'
        network = f"--net=/run/netns/{self.space}"
        return ["nsenter", network, "unshare", "--uts", "--mount", "sh", "-c", script, *words]


@dataclass(frozen=True)
class Bridge:
    """The bridge that connects the machines, and its address on this one."""

    address: str
    machines: tuple[Machine, ...]

    def cut(self) -> None:
        """Let the machines reach only this one, not each other."""
        self._isolate("on")

    def repair(self) -> None:
        self._isolate("off")

    def part(self, one: int, other: int) -> None:
        """Drop everything between two of them silently, by giving each a false address."""
        for here, there in ((one, other), (other, one)):
            nobody = ("lladdr", "02:00:00:00:00:99", "dev", "eth0")
            space, address = self.machines[here].space, self.machines[there].address
            _run("-n", space, "neigh", "replace", address, *nobody)

    def unplug(self, one: int) -> None:
        """Set a machine's link down."""
        _run("link", "set", f"{self.machines[one].space}v", "down")

    def plug(self, one: int) -> None:
        """Set a machine's link up again."""
        _run("link", "set", f"{self.machines[one].space}v", "up")

    def _isolate(self, how: str) -> None:
        for machine in self.machines:
            _run("bridge", "link", "set", "dev", f"{machine.space}v", "isolated", how)


@contextlib.contextmanager
def bridged(names: Sequence[str]) -> Iterator[Bridge]:
    """Make a machine for each name, for the length of a block; only root can."""
    tag = f"sq{os.getpid() % 100000}{'abcdefgh'[next(_numbers) % 8]}"
    # Test processes that start at the same time begin at different subnets.
    order = ((os.getpid() + one) % SUBNETS for one in range(SUBNETS))
    subnet = next(one for one in order if not _is_taken(f"10.77.{one}."))
    with contextlib.ExitStack() as undo:
        _run("link", "add", tag, "type", "bridge")
        undo.callback(_run, "link", "del", tag)
        _run("addr", "add", f"10.77.{subnet}.254/24", "dev", tag)
        _run("link", "set", tag, "up")
        machines = []
        for number, name in enumerate(names, 1):
            space = f"{tag}{number}"
            machine = Machine(name, f"10.77.{subnet}.{number}", space)
            _run("netns", "add", space)
            undo.callback(_run, "netns", "del", space)
            _run("link", "add", f"{space}v", "type", "veth", "peer", "name", "eth0", "netns", space)
            undo.callback(_run, "link", "del", f"{space}v")  # otherwise it goes later than its peer
            _run("link", "set", f"{space}v", "master", tag, "up")
            _run("-n", space, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _run("-n", space, "link", "set", "eth0", "up")
            _run("-n", space, "link", "set", "lo", "up")
            machines.append(machine)
        yield Bridge(f"10.77.{subnet}.254", tuple(machines))


def _is_taken(prefix: str) -> bool:
    shown = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True)
    return prefix in shown.stdout


def _run(program: str, *words: str) -> None:
    """Call iproute2's ip or bridge."""
    argv = [program, *words] if program == "bridge" else ["ip", program, *words]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
