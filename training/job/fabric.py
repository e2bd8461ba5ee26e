"""The variables that libfabric, NCCL and Neuron need on a node: a table with a reason for each.

As AWS advises for the versions at hand (looked up on 2026-08-21): doc/efa-env-var.md and
doc/tuner.md of aws-ofi-nccl with its pull requests 922 and 1225, the EFA cheatsheet of
awsome-distributed-training, the known launcher of Mamba-2 on Neuron. What aws-ofi-nccl itself sets
for an instance (NCCL_BUFFSIZE, NCCL_NVLS_CHUNKSIZE, topology files, ...) is not set here, and
RDMAV_* never is: it breaks newer kernels. An unknown version is assumed to be of the current
generation.

Not here for Neuron: training.parallel.neuron.environment sets NEURON_CC_FLAGS and rounding; TPU_*
was for torch 1.13; torch-neuronx sets NEURON_RT_ROOT_COMM_ID in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.job.machine.instances import Instance
from training.job.machine.software import Software, format_version, is_older
from training.job.types import Decision
from training.parallel.neuron.environment import CACHE, DEFAULTS

NEURON_PORT = 62182
"""The port on rank 0's node at which torch-neuronx lets the nodes' runtimes meet."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts that the table's rules depend on."""

    nodes: int
    processes: int  # on this node
    gpus: bool
    neuron: bool
    efa: bool
    rdma: bool  # accelerators reach those of other nodes directly
    staged: bool  # GPUs exchange through the host's memory
    tuned: bool  # the instance is one that the plugin's tuner knows
    chosen: bool  # NEURON_RT_VISIBLE_CORES names the cores
    software: Software
    cache: str  # folder for Neuron's compiled graphs; empty: the entry point chooses it


@dataclass(frozen=True)
class Rule:
    """A variable, why it is set, and when."""

    name: str
    value: str | Callable[[Situation], str]
    why: str
    when: Callable[[Situation], bool]


def variables(found: Situation) -> list[Decision]:
    """Return the variables to set in a situation, in the table's order."""
    return [
        Decision(one.name, one.value if isinstance(one.value, str) else one.value(found), one.why)
        for one in RULES
        if one.when(found)
    ]


def plugin_warnings(instance: Instance | None, software: Software) -> list[str]:
    """Warn of an aws-ofi-nccl that is older than the instance type; an unknown version passes.

    NCCL's results are right even then, but the plugin takes the node for a generic machine: it
    sends messages by SENDRECV, and without the settings that it has for the type.
    """
    if instance is None or not is_older(software.plugin, instance.fabric.plugin):
        return []
    version, first = format_version(software.plugin), instance.fabric.plugin
    return [
        f"aws-ofi-nccl {version} in this image does not know the {instance.type}, as {first} and "
        "later do: NCCL is slower between nodes than EFA can be; fix: take an image with a newer "
        "one (docs/training/nodes.md has which)"
    ]


def _old_plugin(found: Situation) -> bool:
    """Tell whether GPUs use EFA through a plugin up to 1.5.0."""
    return found.gpus and found.efa and is_older(found.software.plugin, "1.5.1")


def _asks_for_rdma(found: Situation) -> bool:
    """Tell whether the libraries use GPUDirect RDMA only if asked to."""
    software = found.software
    old = is_older(software.libfabric, "1.18") or is_older(software.plugin, "1.7")
    return found.gpus and found.efa and found.rdma and old


def _syncs_too_much(found: Situation) -> bool:
    """Tell whether an old EFA installer meets an NCCL that it does not know."""
    software = found.software
    new = not is_older(software.nccl, "2.19")
    return found.gpus and found.efa and new and is_older(software.installer, "1.29.1")


def _wants_tuner(found: Situation) -> bool:
    """Tell whether NCCL has to be given the path of the tuner.

    NCCL 2.21 and later look for one in the plugin itself, which has contained it since 1.16.
    """
    software = found.software
    usable = found.tuned and bool(software.tuner) and not is_older(software.nccl, "2.21")
    return found.nodes > 1 and usable and is_older(software.plugin, "1.16")


def _between(found: Situation) -> bool:
    """Tell whether Neuron's runtime reaches other nodes by EFA."""
    return found.neuron and found.efa and found.nodes > 1


def _on_neuron(found: Situation) -> bool:
    return found.neuron


RULES = (
    Rule(
        "NCCL_SOCKET_IFNAME",
        "^docker,lo,veth",
        "NCCL's first contact, by no interface that ends on this node",
        lambda found: found.gpus and found.nodes > 1,
    ),
    Rule(
        "NCCL_SHM_USE_CUDA_MEMCPY",
        "1",
        "GPUs that exchange through the host's memory",
        lambda found: found.gpus and found.staged,
    ),
    Rule(
        "NCCL_TUNER_PLUGIN",
        lambda found: found.software.tuner,
        "aws-ofi-nccl before 1.16 does not load its tuner",
        _wants_tuner,
    ),
    Rule("NCCL_PROTO", "simple", "aws-ofi-nccl up to 1.5.0 takes no other", _old_plugin),
    Rule("FI_PROVIDER", "efa", "aws-ofi-nccl up to 1.5.0 does not choose it", _old_plugin),
    Rule("FI_PROVIDER", "efa", "Neuron's runtime does not choose it", _between),
    Rule(
        "FI_EFA_USE_DEVICE_RDMA",
        "1",
        "libfabric before 1.18 or aws-ofi-nccl before 1.7",
        _asks_for_rdma,
    ),
    Rule(
        "FI_EFA_USE_DEVICE_RDMA",
        "1",
        "Neuron's runtime does not choose it",
        lambda found: _between(found) and found.rdma,
    ),
    Rule(
        "FI_EFA_FORK_SAFE",
        "1",
        "Linux before 5.15, on which the runtime does not survive a fork",
        lambda found: _between(found) and is_older(found.software.kernel, "5.15"),
    ),
    Rule(
        "FI_EFA_USE_HUGE_PAGE",
        "0",
        "else readers of data that are forked run out of huge pages",
        lambda found: found.efa,
    ),
    Rule(
        "FI_EFA_SET_CUDA_SYNC_MEMOPS",
        "0",
        "EFA installer before 1.29.1 with NCCL from 2.19 on",
        _syncs_too_much,
    ),
    Rule(
        "NEURON_RT_NUM_CORES",
        lambda found: str(found.processes),
        "a core a process",
        lambda found: found.neuron and not found.chosen,
    ),
    Rule(
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
        DEFAULTS["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"],
        "the next graphs are queued while one runs",
        _on_neuron,
    ),
    Rule(
        "NEURON_FUSE_SOFTMAX",
        DEFAULTS["NEURON_FUSE_SOFTMAX"],
        "the compiler's own softmax",
        _on_neuron,
    ),
    Rule("MALLOC_ARENA_MAX", "64", "glibc else keeps memory apart for every thread", _on_neuron),
    Rule(
        CACHE,
        lambda found: found.cache,
        "compiled graphs, for all nodes and later jobs",
        lambda found: found.neuron and bool(found.cache),
    ),
)
