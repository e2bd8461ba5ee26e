"""The optimizer."""

import pytest
import torch

from tests.training.support.families import HYBRIDS
from training.config.config import OptimConfig
from training.models import MambaConfig, build, preset
from training.models.mamba import Mamba
from training.parallel.optimizer import clip_gradients, decays, make_optimizer


def test_decay_spares_what_it_should() -> None:
    with torch.device("meta"):
        model = Mamba(MambaConfig(d_model=32, n_layer=1, vocab_size=64))
    decayed, spared = make_optimizer(model, OptimConfig(), torch.device("cpu")).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mixer = "backbone.layers.0.mixer."
    assert {names[id(parameter)] for parameter in spared["params"]} == {
        f"{mixer}A_log",
        f"{mixer}D",
        f"{mixer}conv1d.bias",
        f"{mixer}dt_proj.bias",
        "backbone.layers.0.norm.weight",
        "backbone.norm_f.weight",
    }
    assert spared["weight_decay"] == 0 and decayed["weight_decay"] == 0.1
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["mamba2-tiny", "llama-tiny", "mixtral-tiny", *HYBRIDS])
def test_decay_is_for_matrices(name: str) -> None:
    with torch.device("meta"):
        model = build(preset(name))
    found = {key for key, parameter in model.named_parameters() if decays(key)}
    matrices = {key for key, parameter in model.named_parameters() if parameter.dim() > 1}
    assert found == matrices


def test_clipping_gives_the_norm_before() -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    layer.weight.grad = torch.tensor([[0.0, 6.0, 8.0]])
    assert clip_gradients(layer, 5.0).item() == pytest.approx(10.0)
    assert layer.weight.grad.norm().item() == pytest.approx(5.0, rel=1e-5)
