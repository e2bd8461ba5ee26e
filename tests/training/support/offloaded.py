"""The entry point for SMP v2 on CPUs, with other memory in place of the host's; see test_offload.

    torchrun --nproc_per_node=N -m tests.training.support.offloaded FLAGS

Everything but the copies themselves is as on a GPU. At the end, rank 0 prints how many there were.
"""

from __future__ import annotations

import functools
import sys

import torch

from tests.training.parallel.test_offload import LEAST, OtherMemory
from training import llama_smp
from training.config.config import Config
from training.entrypoint import enter, leave
from training.parallel import fsdp, memory, offload
from training.systems.smp.flags import names_for

memories: list[OtherMemory] = []


def other_memory(device: torch.device) -> OtherMemory:
    memories.append(OtherMemory())
    return memories[-1]


def check_but_for_the_device(config: Config, device: torch.device) -> None:
    """Accept a CPU, which is normally refused as a device to offload activations from."""


def main() -> int:
    fsdp.HostMemory = other_memory  # type: ignore[misc,assignment]
    fsdp.Offload = functools.partial(offload.Offload, least=LEAST)  # type: ignore[misc,assignment]
    memory.check_tradeoffs = check_but_for_the_device
    code = enter(llama_smp.configure, sys.argv[1:], names_for(sys.argv[1:]))
    sent = sum(len(one.there) for one in memories)
    fetched = sum(len(one.fetched_at) for one in memories)
    print(f"offloaded: {sent} sent, {fetched} fetched", flush=True)
    return code


if __name__ == "__main__":
    leave(main())
