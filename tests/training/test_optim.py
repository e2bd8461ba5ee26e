"""Schedule and optimizer."""

import math

import pytest
import torch

from training.config import OptimConfig
from training.models import MambaConfig, build, preset
from training.models.mamba import Mamba
from training.optim import clip_gradients, decays, learning_rate, make_optimizer


@pytest.mark.parametrize("num_steps", [100, 1200, 100_000])
def test_schedule_is_the_published_formula(num_steps: int) -> None:
    warm = min(2000, num_steps // 20)
    for x in range(1, num_steps + 1, max(1, num_steps // 500)):
        rising = 1 - (1 - min(x, warm) / warm) ** 2
        falling = 0.1 + 0.5 * (1 - 0.1) * (1 + math.cos(min(x, num_steps) / num_steps * math.pi))
        assert learning_rate(x, num_steps, 3e-4) == pytest.approx(3e-4 * min(rising, falling))


@pytest.mark.parametrize("num_steps", [1, 2, 19, 20])
def test_schedule_of_short_runs(num_steps: int) -> None:
    rates = [learning_rate(step, num_steps, 1.0) for step in range(1, num_steps + 1)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[-1] == pytest.approx(0.1)


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


@pytest.mark.parametrize("name", ["mamba2-tiny", "llama-tiny", "mixtral-tiny"])
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
