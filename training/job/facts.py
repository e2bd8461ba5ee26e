"""What is known of a job and of a node before anything is decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.job.instances import Instance
from training.job.software import Software
from training.job.ulimits import Limit


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm says about the job, as one node sees it."""

    id: str
    restarts: int = 0
    node_rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"  # of the node of rank 0, as all others reach it
    port: int = 0  # 0: any free one

    @property
    def run_id(self) -> str:
        """Name one start of the job: processes of the start before it must not join."""
        return f"{self.id}.{self.restarts}"


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """What /dev has of one kind, each with what is known of it, in the order of its numbers."""

    kind: str = ""  # cuda or neuron; empty: there are none
    seen: int = 0
    places: tuple[int, ...] = ()  # NUMA nodes; empty or negative: not known
    uuids: tuple[str, ...] = ()  # of GPUs; empty: not known
    cores: int = 0  # physical NeuronCores of each, as the driver says; 0: it does not


@dataclass(frozen=True, kw_only=True)
class Node:
    """What this node has, as seen from inside the container."""

    cores: int  # that this task may use
    address: str  # as the others reach it
    interface: str  # network interface of that address; empty if none has it
    type: str = ""  # EC2's name of the instance type; empty: none is known
    type_why: str = ""
    instance: Instance | None = None  # what the table has of it
    accelerators: Accelerators = field(default_factory=Accelerators)
    efa: int | None = None  # network cards; None: no such driver shows itself
    domains: dict[int, tuple[int, ...]] = field(default_factory=dict)  # cores of each NUMA node
    limits: tuple[Limit, ...] = ()
    software: Software = field(default_factory=Software)
