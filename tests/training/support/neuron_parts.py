"""Compare the shared Mamba-2 with the whole one, under torchrun: the same logits and gradients.

usage: torchrun ... -m tests.training.support.neuron_parts degree=N [layers=recorded] SIZE=VALUE ...

With layers=recorded, the layers are those of tests/training/parallel/neuron_contract.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from training import models
from training.config.config import Config, DataConfig, ModelConfig, ParallelConfig, RunConfig
from training.config.setting import READ
from training.entrypoint import leave
from training.models import Mamba2Config
from training.parallel.backend import find_backend
from training.parallel.neuron import device, nxd
from training.parallel.neuron.places import place

TINY = {"d_model": 32, "n_layer": 2, "vocab_size": 64, "head_dim": 8, "d_state": 16}


def main(sizes: Mamba2Config, degree: int) -> None:
    config = Config(
        model=ModelConfig(name="try", sizes=sizes),
        data=DataConfig(dataset_path="synthetic:"),
        run=RunConfig(save_ckpt_path="none", device="cpu", seed=5),
        parallel=ParallelConfig(backend="neuron", tensor_parallel=degree),
    )
    backend = find_backend("neuron")
    group = backend.start(config)
    shared = backend.build(config, group, None)
    whole = models.build(sizes)
    with torch.no_grad():
        for name, one in whole.named_parameters():
            one.copy_(whole.initial(name, one.shape, 5))
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.vocab_size, (2, 40), generator=random)  # (b, l)
    targets = torch.randint(-1, sizes.vocab_size, (2, 40), generator=random)  # (b, l)
    targets[targets < 0] = -100
    weights = torch.rand(2, 40, generator=random)  # (b, l)
    with torch.no_grad():
        torch.testing.assert_close(shared(ids), whole(ids), atol=1e-5, rtol=1e-5)
    losses = [one(ids, targets, weights=weights) for one in (shared, whole)]  # ()
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    for loss in losses:
        loss.backward()
    gradients = {name: one.grad for name, one in whole.named_parameters()}
    ranks: Any = shared.ranks
    for name, one in shared.named_parameters():
        lies = place(name, sizes, ranks.tensor)
        whole_gradient = gradients[lies.name]
        assert one.grad is not None and whole_gradient is not None, name
        difference = (one.grad - lies.of(whole_gradient)).abs().max()  # ()
        assert difference <= 1e-6 + 1e-4 * whole_gradient.abs().max(), f"{name}: {difference}"
    group.barrier()


if __name__ == "__main__":
    changes = dict(word.split("=") for word in sys.argv[1:])
    degree = int(changes.pop("degree"))
    if changes.pop("layers", "own") == "recorded":
        sys.path.insert(0, str(Path(__file__).parents[1] / "parallel" / "neuron_contract"))
        device.uses_nxd = lambda joined: nxd.is_there()
    known = {
        name: READ["bool" if text in ("True", "False") else "int"](text)
        for name, text in changes.items()
    }
    main(Mamba2Config(**(TINY | known)), degree)  # type: ignore[arg-type]
    leave(0)
