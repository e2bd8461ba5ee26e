"""Trading for memory: as much is saved as promised, losses stay the same, the rest is refused."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.support.families import PRESETS, filled
from tests.training.support.runs import ENGINES, TINY, run, train, write_text
from training import compat
from training.config.config import ParallelConfig
from training.errors import RequestError
from training.mamba_fsdp import configure
from training.models import preset
from training.parallel import fsdp1, memory

STEPS, GLOBAL_BATCH = 4, 4
RECOMPUTE = "--fsdp_activation_checkpointing=True"
SELECTIVE = "--checkpointing_policy=selective"
POLICIES = ("full", "selective") if compat.selective_contexts() else ("full",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    return train(tmp_path_factory.mktemp("alone"), data, 0, GLOBAL_BATCH, STEPS)


class Count(TorchDispatchMode):
    """Counts the operations that are computed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(
            count
            for name, count in self.seen.items()
            if name.startswith(("aten.mm.", "aten.addmm.", "aten._scaled_dot_product_"))
        )


@functools.cache
def computed(name: str, **settings: Any) -> tuple[int, int, list[Any]]:
    """Return the products, all operations, and the gradients of a step."""
    model = filled(preset(name))
    memory.mark_recomputed(model.blocks, ParallelConfig(**settings))
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))  # (b, l)
    with Count() as count:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    total = sum(count.seen.values())
    return count.products, total, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PRESETS)
def test_selective_recomputes_all_but_the_products(name: str, policy: str, every: int) -> None:
    plain = computed(name)
    full = computed(name, fsdp_activation_checkpointing=True)
    this = computed(
        name,
        fsdp_activation_checkpointing=True,
        checkpointing_policy=policy,
        selective_checkpointing=every,
    )
    for one, other in zip(this[2], plain[2], strict=True):
        assert torch.equal(one, other)
    if policy == "selective":
        assert this[0] == plain[0] < full[0]
    else:
        assert plain[0] < this[0] and (this[0] == full[0]) == (every == 1)
    assert plain[1] < this[1], "the rest is computed again"


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_loss_depends_on_the_policy(
    tmp_path: Path, data: str, alone: Any, engine: str, policy: str
) -> None:
    flags = (RECOMPUTE, f"--checkpointing_policy={policy}", f"--fsdp_engine={engine}")
    losses = train(tmp_path, data, 2, GLOBAL_BATCH // 2, STEPS, *flags)
    assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_reduced_as_asked(tmp_path: Path, data: str, engine: str) -> None:
    """On two ranks, the first loss precedes any reduction; later ones differ by its rounding."""
    flags = ("--precision=bf16", f"--fsdp_engine={engine}")
    found = {
        how: train(tmp_path / how, data, 2, 2, STEPS, *flags, f"--reduce_precision={how}")
        for how in ("auto", "bf16", "fp32")
    }
    assert found["auto"] == found["bf16"]
    assert found["bf16"][0] == found["fp32"][0] and found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], abs=0.02)


@pytest.mark.processes
def test_fsdp1_is_reported_whether_to_limit_its_gathers(
    tmp_path: Path, data: str, alone: Any
) -> None:
    flags = ("--fsdp_engine=fsdp1", "--limit_all_gathers=False")
    losses = train(tmp_path, data, 2, GLOBAL_BATCH // 2, STEPS, *flags)
    assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.processes
def test_weights_are_gathered_and_let_go_as_asked(tmp_path: Path) -> None:
    """FSDP1 and FSDP2 alike: two gathers, or also the next block's; weights kept, or released."""
    done = run(2, f"{tmp_path}/found", program=("-m", "tests.training.support.gathered"))
    assert done.returncode == 0, done.stderr
    expected = {"plain": [2, 0.5, 0.5], "kept": [2, 1, 0.5], "ahead": [3, 0.5, 0.5]}
    assert json.loads((tmp_path / "found").read_text()) == dict.fromkeys(ENGINES, expected)


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_no_loss_depends_on_when_weights_are_gathered(
    tmp_path: Path, data: str, alone: Any, engine: str
) -> None:
    flags = ("--reshard_after_forward=False", "--forward_prefetch=True", f"--fsdp_engine={engine}")
    late = ("--backward_prefetch=post",) if engine == "fsdp1" else ()
    losses = train(tmp_path, data, 2, GLOBAL_BATCH // 2, STEPS, *flags, *late)
    assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    "name",
    ["flash_attn._flash_attn_varlen_forward.default", "aten._scaled_mm.default"],
)
def test_results_of_what_takes_a_gpu_are_kept_by_name(name: str) -> None:
    """Attention over documents by the flash-attn library, and products in float8."""
    assert memory._is_kept(name) and not memory._is_kept("aten.bmm.default")


def test_auto_reduces_in_what_the_blocks_compute_in() -> None:
    assert fsdp1.reduce_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert fsdp1.reduce_dtype("auto", torch.float32) == torch.float32


def refusals() -> list[tuple[tuple[str, ...], str]]:
    """Return flags, and the messages about them."""
    found: list[tuple[tuple[str, ...], str]] = [
        ((SELECTIVE,), "checkpointing_policy: only fsdp_activation_checkpointing=True"),
        (("--selective_checkpointing=2",), "selective_checkpointing: only fsdp_activation_"),
        (
            (RECOMPUTE, SELECTIVE, "--use_torch_compile=True"),
            "checkpointing_policy: selective sees no operation of compiled blocks",
        ),
        (("--activation_loading_horizon=1",), "activation_loading_horizon: only offload_activ"),
        (
            ("--offload_activations=True", "--activation_loading_horizon=1"),
            "offload_activations: on a CPU everything is in the host's memory already",
        ),
        (("--offload_activations=True",), "activation_loading_horizon: 2 blocks ahead are all"),
        (("--cpu_offload=True",), "cpu_offload: on a CPU everything is in the host's memory"),
        (
            ("--cpu_offload=True", "--fsdp_engine=fsdp1", "--gradient_accumulation=2"),
            "cpu_offload: FSDP1 does not add up gradients",
        ),
        (("--reduce_precision=bf16",), "reduce_precision: bf16 would round the gradients"),
    ]
    if compat.fsdp2():
        found.append((("--limit_all_gathers=False",), "limit_all_gathers: FSDP2 always limits"))
        found.append((("--backward_prefetch=post",), "backward_prefetch: FSDP2 always gathers"))
    if not compat.selective_contexts():
        found.append(((RECOMPUTE, SELECTIVE), "checkpointing_policy: selective needs torch 2.4"))
    return found


@pytest.mark.parametrize(("flags", "message"), refusals())
def test_what_cannot_be_had_is_refused(flags: tuple[str, ...], message: str) -> None:
    asked = ("--model_name=mamba-tiny", "--dataset_path=synthetic:", "--save_ckpt_path=out")
    with pytest.raises(RequestError) as error:
        memory.check_tradeoffs(configure((*asked, *flags)), torch.device("cpu"))
    assert message in str(error.value)


@pytest.mark.processes
def test_a_run_that_cannot_have_it_ends_before_it_begins(tmp_path: Path, data: str) -> None:
    given = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}/run", "--cpu_offload=True")
    done = run(0, *TINY, *given, "--num_steps=2")
    assert done.returncode == 2 and done.stderr.startswith("error: cpu_offload: on a CPU")
    assert not (tmp_path / "run").exists()
