"""The optimizer."""

from typing import Any

import pytest
import torch

from tests.training.support.families import HYBRIDS, filled
from training import compat
from training.config.config import OptimConfig
from training.models import MambaConfig, build, preset
from training.models.mamba import Mamba
from training.parallel.backend import find_backend
from training.parallel.optimizer import clip_gradients, decays, make_optimizer


def test_decay_spares_what_it_should() -> None:
    with torch.device("meta"):
        model = Mamba(MambaConfig(d_model=32, n_layer=1, vocab_size=64))
    decayed, spared = make_optimizer(model, OptimConfig()).param_groups
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


def optimized(**optim: Any) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Return a model and its optimizer after two steps."""
    model = filled(MambaConfig(d_model=32, n_layer=1, vocab_size=64))
    optimizer = make_optimizer(model, OptimConfig(**optim))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)  # the parameter's shape
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_the_fused_kernel_where_torch_has_it_steps_as_torch_s_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    fused, optimizer = optimized()
    assert optimizer.defaults["fused"] == (torch.__version__ >= "2.4")
    monkeypatch.setattr(compat, "fuses_adamw", lambda device_type: False)
    torch.manual_seed(1)
    looped, _ = optimized()
    for mine, theirs in zip(fused.parameters(), looped.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_a_restored_optimizer_has_the_settings_that_were_asked_for(before: bool, now: bool) -> None:
    """Only the moments come from the checkpoint."""
    backend = find_backend("fsdp")
    old_model, old = optimized(decay_all=before)
    others = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    settings: dict[str, Any] = {"decay_all": now, **others}
    model, optimizer = optimized(**settings)
    backend.restore(model, optimizer, backend.state(old_model, old))
    asked = make_optimizer(model, OptimConfig(**settings))
    for group, wanted in zip(optimizer.param_groups, asked.param_groups, strict=True):
        assert [id(one) for one in group["params"]] == [id(one) for one in wanted["params"]]
        for name in ("weight_decay", "betas", "eps", "fused"):
            assert group[name] == wanted[name]
    for mine, theirs in zip(model.parameters(), old_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in old.state[theirs].items():
            assert torch.equal(optimizer.state[mine][name], value)


def test_clipping_gives_the_norm_before() -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    layer.weight.grad = torch.tensor([[0.0, 6.0, 8.0]])
    assert clip_gradients(layer, 5.0).item() == pytest.approx(10.0)
    assert layer.weight.grad.norm().item() == pytest.approx(5.0, rel=1e-5)
