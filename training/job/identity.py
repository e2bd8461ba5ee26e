"""Which type of EC2's this machine is: INSTANCE_TYPE, else its firmware, else the metadata service.

DMI on Nitro names the type itself. On Xen it does not, so the metadata service (IMDSv2) is asked,
which answers from a link-local address within milliseconds or, elsewhere, never.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

from training.errors import RequestError
from training.job.files import content
from training.job.types import GIVEN

GIVEN_TYPE = "INSTANCE_TYPE"
SERVICE = "http://169.254.169.254"
PATIENCE = 1.0  # seconds for both questions to the metadata service
DMI = Path("sys/devices/virtual/dmi/id")
_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")


def instance_type(root: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Give EC2's name of this machine's type, empty if it has none, and how it was found.

    root: where /sys is looked for. Raises RequestError for an INSTANCE_TYPE that cannot be one.
    """
    given = environment.get(GIVEN_TYPE, "")
    if given:
        if not _TYPE.fullmatch(given):
            raise RequestError(f"{GIVEN_TYPE}: must be a type such as p5.48xlarge, not {given!r}")
        return given, GIVEN
    vendor, product = content(root / DMI / "sys_vendor"), content(root / DMI / "product_name")
    amazon = "amazon" in vendor.lower()
    if amazon and _TYPE.fullmatch(product):
        return product, "as its firmware says (DMI)"
    xen = vendor == "Xen" or (not vendor and content(root / "sys/hypervisor/type") == "xen")
    if not amazon and not xen:
        return "", "its firmware is not EC2's" if vendor else "it has no DMI, as EC2's have"
    try:
        return _asked(environment), "as the metadata service says"
    except (OSError, HTTPException, ValueError) as error:
        return "", f"the metadata service does not say: {getattr(error, 'reason', error)}"


def _asked(environment: Mapping[str, str]) -> str:
    """Ask the metadata service. Raises OSError, HTTPException or ValueError if it does not say."""
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise ValueError("AWS_EC2_METADATA_DISABLED=true")
    service = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or SERVICE
    until = time.monotonic() + PATIENCE
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
        raise ValueError(f"{found!r} is no type")
    return found
