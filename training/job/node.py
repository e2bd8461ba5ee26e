"""The job and this node as seen from inside the container: its devices, network and ports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.errors import TrainingError
from training.job.machine import devices, instances, software, ulimits
from training.job.machine.instances import Instance
from training.job.machine.software import Software
from training.job.machine.ulimits import Limit
from training.job.types import file_text

HERE = Path("/")
NEURON_TOOLS = "/opt/aws/neuron/bin"

OUTSIDE = "192.0.2.1"  # RFC 5737: nobody's, so only the default route leads there
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm says about the job, as one node sees it."""

    id: str
    restarts: int = 0
    node_rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"  # of node 0, as all others reach it
    port: int = 0  # 0: any free one
    spares: int = 0  # how many of the nodes wait to replace a lost one
    shrink: bool = False  # whether to go on with fewer nodes when no spare is left

    @property
    def training(self) -> int:
        """How many nodes train."""
        return self.nodes - self.spares

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job may go on in the same start when a node is lost."""
        return self.spares > 0 or self.shrink

    @property
    def run_id(self) -> str:
        """The name of this start of the job: processes of an earlier start must not join."""
        return f"{self.id}.{self.restarts}"


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The accelerators in /dev, all of one kind, and what is known of each, in order of number."""

    kind: str = ""  # cuda or neuron; empty: there are none
    seen: int = 0
    places: tuple[int, ...] = ()  # NUMA nodes; empty or negative: not known
    uuids: tuple[str, ...] = ()  # of GPUs; empty: not known
    cores: int = 0  # physical NeuronCores of each, from the driver; 0: not known


@dataclass(frozen=True, kw_only=True)
class Node:
    """What this node has, as seen from inside the container."""

    cores: int  # that this task may use
    address: str  # as the others reach it
    interface: str  # network interface of that address; empty if none has it
    type: str = ""  # EC2's name of the instance type; empty: none is known
    type_why: str = ""
    instance: Instance | None = None  # its row of the table; None: it has none
    accelerators: Accelerators = field(default_factory=Accelerators)
    efa: int | None = None  # network cards; None: no driver of such cards is visible
    domains: dict[int, tuple[int, ...]] = field(default_factory=dict)  # cores of each NUMA node
    limits: tuple[Limit, ...] = ()
    software: Software = field(default_factory=Software)


def look_at_node(job: Job, environment: Mapping[str, str] = os.environ, root: Path = HERE) -> Node:
    """Look at this node's devices, network, limits and software.

    root: where /dev, /sys, /proc and installed software are looked for. Raises TrainingError if the
    first node cannot be resolved or reached, and RequestError for an invalid INSTANCE_TYPE.
    """
    address, interface = "127.0.0.1", ""
    if job.nodes > 1:
        address = own_address(job.address)
        interface = interface_of(address)
    type, type_why = instances.instance_type(root, environment)
    allowed = os.sched_getaffinity(0)
    return Node(
        cores=len(allowed),
        address=address,
        interface=interface,
        type=type,
        type_why=type_why,
        instance=instances.find_instance(type),
        accelerators=_accelerators(root, environment),
        efa=devices.count_efa(root),
        domains=devices.cores_by_numa_node(root, allowed),
        limits=ulimits.current_limits(),
        software=software.look_at_software(root, environment),
    )


def _accelerators(root: Path, environment: Mapping[str, str]) -> Accelerators:
    """Find the accelerators, of whichever kind there is."""
    chips = devices.count_devices(root, "neuron")
    if chips:
        programs = f"{environment.get('PATH', '')}:{NEURON_TOOLS}"
        return Accelerators(
            kind="neuron",
            seen=chips,
            places=tuple(devices.places_of_chips(root, programs)),
            cores=devices.cores_of_chip(root),
        )
    seen, found = devices.count_devices(root, "nvidia"), devices.list_gpus(root)
    return Accelerators(
        kind="cuda" if seen else "",
        seen=seen,
        places=tuple(one.numa for one in found),
        uuids=tuple(one.uuid for one in found),
    )


def own_address(address: str) -> str:
    """Return this machine's own address on the way to another one. Sends nothing.

    If the other one is this machine, by a name to which /etc/hosts gives a loopback address as
    Debian's does, it is the address on the default route. Raises TrainingError.
    """
    try:
        own = _source(address)
    except OSError as error:
        reason = f"MASTER_ADDR: {address} cannot be reached: {error.strerror}"
        raise TrainingError(reason) from error
    if own.startswith("127.") and not address.startswith("127."):
        with contextlib.suppress(OSError):  # no default route: the machine is alone
            return _source(OUTSIDE)
    return own


def _source(address: str) -> str:
    family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name the network interface that has an IPv4 address; empty if none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def require_port(port: int) -> None:
    """Raise TrainingError if a port cannot be opened; if it is taken, say by whom if that shows."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        # At all addresses, as the rendezvous does.
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise TrainingError(
                f"MASTER_PORT: {port} cannot be opened on node 0: {error.strerror}", local=True
            ) from error
        raise TrainingError(
            f"MASTER_PORT: {port} of node 0 is taken by {port_holder(port)}; fix: end that, or set "
            "another port (MASTER_PORT), the same for all nodes",
            local=True,
        ) from error


def port_holder(port: int) -> str:
    """Describe who holds a port: the process, else the user that /proc/net shows."""
    users = {}
    for table in ("tcp", "tcp6"):
        for line in file_text(PROC / "net" / table).splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                users[fields[9]] = fields[7]
    for folder in PROC.iterdir() if users else ():
        if folder.name.isdigit() and _sockets(folder) & {f"socket:[{one}]" for one in users}:
            words = file_text(folder / "cmdline").replace("\0", " ").strip()
            return f"process {folder.name} ({words})"
    if users:
        return f"a process of user {sorted(users.values())[0]}"
    return "a process that /proc/net does not show"


def _sockets(process: Path) -> set[str]:
    """The open files of a process; empty if it is another user's, or ends meanwhile."""
    found = set()
    with contextlib.suppress(OSError):
        for one in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(one.readlink()))
    return found
