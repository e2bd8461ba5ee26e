"""Several runs in one process, or in one per rank: `... several.py FILE [FILE ...]`.

With SHARDED=1 they use Composer's FSDP, which then takes the CPU for a GPU. They save nothing, as
torch can only collect a model that FSDP shards on a GPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from training import mamba_composer
from training.systems.composer import trainer

if os.environ.get("SHARDED"):
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: False  # type: ignore[assignment]
    ordinary = trainer.Trainer

    def on_cpu(**options: Any) -> Any:
        options |= {"save_folder": None, "autoresume": False, "device": "cpu"}
        return ordinary(**options)

    trainer.Trainer = on_cpu
    make = trainer._model
    trainer._model = lambda config, device, say: make(config, torch.device("cuda"), say)

for file in sys.argv[1:]:
    mamba_composer.main([file])
