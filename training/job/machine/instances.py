"""EC2's instance types for training, what each has, and which of them this machine is.

Looked up on 2026-08-21. Accelerators, memory, EFA cards and bandwidth: DescribeInstanceTypes, as
Karpenter's provider for AWS lists it (commit 1d927085d). GPUDirect RDMA and protocol:
`platform_data_map` of aws-ofi-nccl (commit 2daf7d30); the first version that knows a type: the same
map at its tags; the types that its tuner knows: its doc/tuner.md. Types whose GPUs exchange through
the host: the EFA cheatsheet of awsome-distributed-training. EFA cards of trn1 and trn1n, memory and
cores of trn2: AWS's documentation of Neuron. A type that is not here is no error: the devices that
the node shows count.

This machine's type comes from INSTANCE_TYPE, else from its firmware, else from the metadata
service. On Nitro, DMI names the type. On Xen it does not, so the metadata service (IMDSv2) is
asked, which answers from a link-local address within milliseconds or, elsewhere, never.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from training.errors import RequestError
from training.job.types import GIVEN, file_text

GIVEN_TYPE = "INSTANCE_TYPE"
METADATA_SERVICE = "http://169.254.169.254"
METADATA_TIMEOUT = 1.0  # seconds for both questions to the metadata service
DMI = Path("sys/devices/virtual/dmi/id")
_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")


@dataclass(frozen=True)
class Chip:
    """An accelerator."""

    name: str
    memory: int  # MiB
    cores: int = 0  # physical NeuronCores; 0: it is a GPU


@dataclass(frozen=True)
class Fabric:
    """A node's network to the other nodes."""

    gbits: float  # Gbit/s of all cards together, without bursts
    efa: int = 0  # EFA cards, if all are attached
    rdma: bool = False  # accelerators reach those of other nodes directly (GPUDirect RDMA)
    protocol: str = ""  # of aws-ofi-nccl; empty: its own default
    tuned: bool = False  # aws-ofi-nccl's tuner knows the type
    plugin: str = ""  # first aws-ofi-nccl that knows the type; empty: all do, or none has to


@dataclass(frozen=True)
class Instance:
    """What all instances of a type have."""

    type: str
    chip: Chip
    count: int  # of chips
    fabric: Fabric
    staged: bool = False  # its GPUs exchange through the host's memory, best by their copy engines

    @property
    def family(self) -> str:
        """The name up to the dot: p4d of p4d.24xlarge."""
        return self.type.partition(".")[0]


def find_instance(type: str) -> Instance | None:
    """Look up a type by its EC2 name."""
    return TYPES.get(type)


A10G, L4, L40S = Chip("A10G", 22888), Chip("L4", 22888), Chip("L40S", 45776)
H100, H200 = Chip("H100", 81920), Chip("H200", 144384)
B200, B300 = Chip("B200", 183359), Chip("B300", 275040)
RTX = Chip("RTX PRO 6000", 98304)
TRAINIUM, TRAINIUM2 = Chip("Trainium", 32768, cores=2), Chip("Trainium2", 98304, cores=8)

_ROWS = (
    Instance("p4d.24xlarge", Chip("A100", 40960), 8, Fabric(400, 4, True, "SENDRECV")),
    Instance("p4de.24xlarge", Chip("A100", 81920), 8, Fabric(400, 4, True, "SENDRECV")),
    Instance("p5.4xlarge", H100, 1, Fabric(100, 1, False, "SENDRECV")),
    Instance("p5.48xlarge", H100, 8, Fabric(3200, 32, True, "RDMA", True, "1.7.0")),
    Instance("p5e.48xlarge", H200, 8, Fabric(3200, 32, True, "RDMA", True, "1.11.0")),
    Instance("p5en.48xlarge", H200, 8, Fabric(3200, 16, True, "RDMA", True, "1.13.0")),
    Instance("p6-b200.48xlarge", B200, 8, Fabric(3200, 8, True, "RDMA", True, "1.14.0")),
    Instance("p6-b300.48xlarge", B300, 8, Fabric(6400, 16, True, "RDMA", True, "1.14.0")),
    Instance("g5.xlarge", A10G, 1, Fabric(2.5)),
    Instance("g5.2xlarge", A10G, 1, Fabric(5)),
    Instance("g5.4xlarge", A10G, 1, Fabric(10)),
    Instance("g5.8xlarge", A10G, 1, Fabric(25, 1)),
    Instance("g5.12xlarge", A10G, 4, Fabric(40, 1), staged=True),
    Instance("g5.16xlarge", A10G, 1, Fabric(25, 1)),
    Instance("g5.24xlarge", A10G, 4, Fabric(50, 1), staged=True),
    Instance("g5.48xlarge", A10G, 8, Fabric(100, 1, False, "SENDRECV")),
    Instance("g6.8xlarge", L4, 1, Fabric(25, 1)),
    Instance("g6.12xlarge", L4, 4, Fabric(40, 1), staged=True),
    Instance("g6.16xlarge", L4, 1, Fabric(25, 1)),
    Instance("g6.24xlarge", L4, 4, Fabric(50, 1), staged=True),
    Instance("g6.48xlarge", L4, 8, Fabric(100, 1), staged=True),
    Instance("g6e.24xlarge", L40S, 4, Fabric(200, 2)),
    Instance("g6e.48xlarge", L40S, 8, Fabric(400, 4)),
    Instance("g7e.8xlarge", RTX, 1, Fabric(100, 1, False, "SENDRECV", plugin="1.17.2")),
    Instance("g7e.12xlarge", RTX, 2, Fabric(400, 1, True, "RDMA", plugin="1.17.2")),
    Instance("g7e.24xlarge", RTX, 4, Fabric(800, 2, True, "RDMA", plugin="1.17.2")),
    Instance("g7e.48xlarge", RTX, 8, Fabric(1600, 4, True, "RDMA", plugin="1.17.2")),
    Instance("trn1.2xlarge", TRAINIUM, 1, Fabric(3)),
    Instance("trn1.32xlarge", TRAINIUM, 16, Fabric(800, 8, True, "RDMA")),
    Instance("trn1n.32xlarge", TRAINIUM, 16, Fabric(1600, 16, True, "RDMA")),
    Instance("trn2.48xlarge", TRAINIUM2, 16, Fabric(3200, 16, True, "RDMA")),
)
TYPES = {one.type: one for one in _ROWS}


def instance_type(root: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the EC2 name of this machine's type, empty if it has none, and how it was found.

    root: where /sys is looked for. Raises RequestError for an invalid INSTANCE_TYPE.
    """
    given = environment.get(GIVEN_TYPE, "")
    if given:
        if not _TYPE.fullmatch(given):
            raise RequestError(f"{GIVEN_TYPE}: must be a type such as p5.48xlarge, not {given!r}")
        return given, GIVEN
    vendor, product = file_text(root / DMI / "sys_vendor"), file_text(root / DMI / "product_name")
    amazon = "amazon" in vendor.lower()
    if amazon and _TYPE.fullmatch(product):
        return product, "as its firmware says (DMI)"
    xen = vendor == "Xen" or (not vendor and file_text(root / "sys/hypervisor/type") == "xen")
    if not amazon and not xen:
        return "", "its firmware is not EC2's" if vendor else "it has no DMI, as EC2's have"
    try:
        return _ask_metadata(environment), "as the metadata service says"
    except (OSError, HTTPException, ValueError) as error:
        return "", f"the metadata service does not say: {getattr(error, 'reason', error)}"


def _ask_metadata(environment: Mapping[str, str]) -> str:
    """Ask the metadata service. Raises OSError, HTTPException or ValueError if it does not say."""
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise ValueError("AWS_EC2_METADATA_DISABLED=true")
    service = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA_SERVICE
    until = time.monotonic() + METADATA_TIMEOUT
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(method: str, what: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(
            f"{service.rstrip('/')}/latest/{what}", method=method, headers=headers
        )
        with direct.open(request, timeout=max(0.01, until - time.monotonic())) as answer:
            return str(answer.read(200).decode("ascii")).strip()

    token = ask("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    found = ask("GET", "meta-data/instance-type", {"X-aws-ec2-metadata-token": token})
    if not _TYPE.fullmatch(found):
        raise ValueError(f"{found!r} is not a type")
    return found
