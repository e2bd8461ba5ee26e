"""The entry point for SMP v2 with the contract in place of the library.

    torchrun --nproc_per_node=N -m tests.training.parallel.smp_contract.run FILE FLAGS

Writes FILE.<rank>: how that rank has called the interface.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import _init_utils

# FSDP1 sends rank 0's values only between GPUs; gloo can send them as well.
_init_utils._check_module_states_for_sync_module_states = lambda module_states: None
torch.__path__.append(str(Path(__file__).parent))

from training import llama_smp  # noqa: E402
from training.entrypoint import enter, leave  # noqa: E402
from training.systems.smp.flags import names_for  # noqa: E402


def main() -> int:
    import torch.sagemaker as tsm

    code = enter(llama_smp.configure, sys.argv[2:], names_for(sys.argv[2:]))
    if tsm.is_initialized():
        Path(f"{sys.argv[1]}.{tsm.state.rank}").write_text(json.dumps(tsm.CALLS))
    return code


if __name__ == "__main__":
    leave(main())
