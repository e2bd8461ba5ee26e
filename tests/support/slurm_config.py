"""The configuration of the test cluster's daemons."""

from __future__ import annotations

import random
import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.network_namespaces import Bridge
from tests.support.ports import free_ports

NODES = ("n1", "n2")
CORES = 2  # of each node, whatever the machine has

CONFIG = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job waits until its old credential has expired: 2 minutes where nothing is said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000
ReturnToService=2
SlurmdParameters=config_overrides
# A lost node is found within half a minute, and a busy machine is not taken for one.
SlurmdTimeout=10
MessageTimeout=30
KillWait={kill_wait}
# The jobs of two clusters on one machine have different numbers, hence different ports.
FirstJobId={first_job}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def write(
    kill_wait: int,
    bridge: Bridge | None = None,
    settings: Sequence[str] = (),
    names: Sequence[str] = NODES,
) -> Path:
    """Make a folder with everything that the daemons read, on free ports; returns slurm.conf.

    Without a bridge, all nodes are this machine. Further settings become lines at the file's end.
    """
    # A socket's path must be short, and munged requires folders that others may enter.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(1 + len(names))
    where = (
        [(machine.name, machine.address) for machine in bridge.machines]
        if bridge
        else [(host, "127.0.0.1") for _ in names]
    )
    nodes = (
        f"NodeName={node} NodeHostname={name} NodeAddr={address} Port={port} CPUs={CORES}"
        for node, (name, address), port in zip(names, where, ports[1:], strict=True)
    )
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=host,
            address=bridge.address if bridge else "127.0.0.1",
            port=ports[0],
            folder=folder,
            kill_wait=kill_wait,
            first_job=random.randrange(1, 60_000) * 1000,
            nodes="\n".join(nodes),
        )
        + "".join(f"{line}\n" for line in settings)
    )
    return config


def munged(folder: Path) -> list[str]:
    return [
        "--foreground",
        "--num-threads=10",
        f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munge.seed",
    ]
