"""Start this node's part, and the conductor on node 0."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from training.errors import BadNode
from training.job.plan import Plan
from training.job.preflight import settings as settings_
from training.job.preflight.checks_network import Shared
from training.job.preflight.coordinator import Conductor
from training.job.preflight.names import Names
from training.job.preflight.participant import Attendee


def run(
    plan: Plan,
    environment: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.time,
    root: Path = Path("/"),
) -> None:
    """Check this node and, with the others of the job, all. Every node of it must call this.

    `clock` is this node's, in seconds since 1970; `root` is where its /sys and /dev are looked at.
    Raises BadNode on all nodes if one is bad, or cannot be met; RequestError.
    """
    settings = settings_.read(environment)
    job = plan.job
    if not settings.wanted:
        if job.node_rank == 0:
            print("training.preflight: left out, as PREFLIGHT=0 asks", flush=True)
        return
    port = settings_.port(job)
    names = Names(job, environment)
    address = job.address if job.nodes > 1 else "127.0.0.1"
    if job.node_rank:
        Attendee(plan, environment, settings, names, clock, root).run(address, port)
        return
    if settings.shared is not None:
        Shared(settings.shared, job).remove_earlier()
    try:
        conductor = Conductor(job, settings, names, clock, os.urandom(8).hex(), port)
    except OSError as error:
        told = f"port {port} of {names[0]}, where the nodes meet: {error.strerror or error}"
        raise BadNode(f"preflight: {told}; MASTER_PORT leads to another") from error
    thread = threading.Thread(target=conductor.run, name="preflight-conductor", daemon=True)
    thread.start()
    Attendee(plan, environment, settings, names, clock, root).run(address, conductor.port)
    thread.join(settings.limit)
