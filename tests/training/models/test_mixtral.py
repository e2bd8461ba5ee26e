"""Mixtral against Hugging Face's own, and the routing against its definition."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.training.support.families import (
    advances_like_forward,
    compare,
    filled,
    like,
    randomised,
    recomputation_changes_nothing,
    wrapping_skips_no_block,
)
from training.errors import RequestError
from training.models import MixtralConfig, build, preset
from training.models.language import LanguageModel
from training.ops.route import balance_loss, experts, load, route

SMALL = MixtralConfig(
    d_model=32, n_layer=2, vocab_size=61, n_head=4, n_kv_head=2, d_ff=24, n_expert=4
)


def theirs_of(config: MixtralConfig) -> Any:
    """Make Hugging Face's model of the same sizes."""
    ways: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    sizes = transformers.MixtralConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head,
        head_dim=config.d_head,
        intermediate_size=config.d_ff,
        num_local_experts=config.n_expert,
        num_experts_per_tok=config.top_k,
        output_router_logits=config.balance_coefficient > 0,
        sliding_window=config.window or None,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=None,
        **ways,
    )
    return transformers.MixtralForCausalLM(sizes)


def renamed(theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert theirs to our names; in memory, theirs hold an expert's first two matrices as one."""
    ours = {}
    for name, value in theirs.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            ours[f"{stem}w1"], ours[f"{stem}w3"] = value.chunk(2, dim=1)
        else:
            ours[name.replace("experts.down_proj", "experts.w2")] = value
    return ours


@pytest.mark.parametrize("kind", ["", "left", "right"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        like(SMALL, n_expert=8, balance_coefficient=0.5),
        like(SMALL, n_expert=3, top_k=1, window=4, tie_embeddings=True),
        like(SMALL, n_expert=5, top_k=3, n_layer=3, balance_coefficient=2.0),
        like(SMALL, n_expert=1, top_k=1),
        like(SMALL, top_k=4, balance_coefficient=1.0),
    ],
)
def test_equals_transformers(config: MixtralConfig, kind: str) -> None:
    reference = randomised(theirs_of(config))
    compare(build(config), reference, renamed, kind=kind, balance=config.balance_coefficient)


def test_balance_is_not_part_of_the_loss_when_evaluating() -> None:
    tokens = torch.randint(61, (2, 20))
    model = filled(like(SMALL, balance_coefficient=3.0))
    trained = model(tokens, tokens.roll(-1, 1))
    evaluated = model.eval()(tokens, tokens.roll(-1, 1))
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    torch.testing.assert_close(evaluated, expected)
    assert trained - evaluated > 3 * 2 * 0.9  # the coefficient, times top_k if all is balanced


def test_the_gate_learns_to_balance() -> None:
    """All tokens prefer one expert at first; the balance loss alone spreads them."""
    x = 0.3 * torch.randn(400, 8, generator=torch.Generator().manual_seed(1)) + 1
    gate = torch.zeros(4, 8)
    gate[0] = 1.0
    gate.requires_grad_()
    optimizer = torch.optim.Adam([gate], lr=0.02)
    values = []
    for _ in range(200):
        _, chosen, logits = route(x, gate, 1)
        loss = balance_loss(load(logits, chosen), 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[0] > 3.9 and values[-1] < 1.3


def test_the_load_counts_no_padding() -> None:
    logits = torch.randn(6, 3)
    chosen = logits.topk(2).indices
    mask = torch.tensor([True, False, True, True, False, True])
    torch.testing.assert_close(
        load(logits, chosen, mask), load(logits[mask], chosen[mask]), rtol=1e-6, atol=1e-6
    )
    assert balance_loss(load(logits, chosen, torch.zeros(6, dtype=torch.bool)), 2) == 0


def test_even_use_of_experts_costs_top_k() -> None:
    chosen = torch.tensor([[0, 1], [2, 3]])
    torch.testing.assert_close(balance_loss(load(torch.zeros(2, 4), chosen), 2), torch.tensor(2.0))


def problem(t: int, e: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make tokens, gate, w1, w3 and w2."""
    random = torch.Generator().manual_seed(t + e)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True)

    return normal(t, 4), normal(e, 4), normal(e, 3, 4), normal(e, 3, 4), normal(e, 4, 3)


def defined(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, top_k: int) -> Tensor:
    """Compute the definition: one token after the other."""
    ys = []
    for token in x:
        p = torch.softmax(gate @ token, 0)
        best = sorted(range(len(gate)), key=lambda e: -p[e].item())[:top_k]
        total = sum(p[e] for e in best)
        ys.append(
            sum(p[e] / total * (w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))) for e in best)
        )
    return torch.stack(ys)  # type: ignore[arg-type]


def routed(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, top_k: int) -> Tensor:
    weights, chosen, _ = route(x, gate, top_k)
    return experts(x, weights, chosen, w1, w3, w2)


@pytest.mark.parametrize(("t", "e", "top_k"), [(7, 4, 2), (1, 5, 1), (9, 3, 3), (2, 8, 2)])
def test_experts_equal_their_definition(t: int, e: int, top_k: int) -> None:
    inputs = problem(t, e)
    found, wanted = routed(*inputs, top_k), defined(*inputs, top_k)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    weight = torch.randn(found.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    references = torch.autograd.grad((wanted * weight).sum(), inputs)
    for one, other in zip(gradients, references, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_experts_gradcheck() -> None:
    assert torch.autograd.gradcheck(functools.partial(routed, top_k=2), problem(5, 3))


def test_an_expert_without_tokens_has_no_gradient() -> None:
    x, _, w1, w3, w2 = problem(6, 3)
    chosen = torch.tensor([[0, 2]] * 6)
    experts(x, torch.full((6, 2), 0.5, dtype=x.dtype), chosen, w1, w3, w2).sum().backward()
    for w in (w1, w3, w2):
        assert w.grad is not None and (w.grad[1] == 0).all() and (w.grad[0] != 0).any()


def test_experts_in_bfloat16_are_close_and_repeat_exactly() -> None:
    x, gate, *w = problem(200, 4)
    weights, chosen, _ = route(x.float(), gate.float(), 2)
    exact = experts(x, weights.double(), chosen, *w)
    narrow = [one.bfloat16() for one in (x, *w)]
    y, again = (experts(narrow[0], weights, chosen, *narrow[1:]) for _ in range(2))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, again, rtol=0, atol=0)
    assert (y.double() - exact).norm() < 0.02 * exact.norm()


def test_experts_keep_what_grows_with_the_chosen_only() -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x, gate, *w = problem(300, 16)
    weights, chosen, _ = route(x, gate, 2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        experts(x, weights, chosen, *w)
    given = (x, weights, chosen, *w)
    assert sum(kept) - sum(one.numel() for one in given) == 300 * 2 * 2 * 3  # t, k, two, f


def test_parameter_count_is_the_published_one() -> None:
    with torch.device("meta"):
        model = build(preset("mixtral-8x7b"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 46_702_792_704


def test_first_values() -> None:
    config = like(SMALL, d_model=128, d_ff=256, n_layer=8)
    model = build(config)
    for name, deviation in (("w1", 0.02), ("w3", 0.02), ("w2", 0.02 / 4)):
        whole = f"model.layers.1.mlp.experts.{name}"
        first = model.initial(whole, model.get_parameter(whole).shape, seed=1)
        assert abs(first.std() / deviation - 1) < 0.02
    gate = model.initial("model.layers.1.mlp.gate.weight", torch.Size((4, 128)), seed=1)
    assert abs(gate.std() / 0.02 - 1) < 0.15


@pytest.mark.parametrize("split", [(13,), (1,) * 13, (5, 1, 7)])
@pytest.mark.parametrize("window", [0, 4])
def test_advance_equals_forward(window: int, split: tuple[int, ...]) -> None:
    advances_like_forward(filled(like(SMALL, window=window)), split)


@pytest.mark.parametrize("coefficient", [0.0, 1.5])
def test_recomputation_changes_nothing(coefficient: float) -> None:
    recomputation_changes_nothing(like(SMALL, balance_coefficient=coefficient))


def test_wrapping_skips_no_block() -> None:
    wrapping_skips_no_block(like(SMALL, balance_coefficient=1.0), "model.layers")


def test_accumulated_batches_have_the_balance_loss_once() -> None:
    """The gradient of half the loss, twice, is that of the loss: the balance scales with it."""

    def gradients(model: LanguageModel, share: float, times: int) -> list[Tensor]:
        tokens = torch.arange(40).view(2, 20)
        for _ in range(times):
            (share * model(tokens, tokens + 1)).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    sizes = like(SMALL, balance_coefficient=2.0)
    once, twice = gradients(filled(sizes), 1.0, 1), gradients(filled(sizes), 0.5, 2)
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other)


def test_experts_have_no_bias() -> None:
    with pytest.raises(RequestError, match="mlp_bias: experts have none"):
        like(SMALL, mlp_bias=True)
