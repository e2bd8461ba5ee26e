"""How the experts of Mixtral, one tensor per layer, are sharded over ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.training.support import runs
from tests.training.support.runs import losses, train, write_text
from training.models import MixtralConfig, build
from training.parallel.fsdp import expert_placements

pytestmark = [pytest.mark.processes, pytest.mark.fsdp2]

SIZES: dict[str, Any] = {
    "d_model": 64,
    "n_layer": 2,
    "vocab_size": 256,
    "n_head": 4,
    "n_kv_head": 2,
    "d_ff": 72,
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_text(tmp_path / "text")


@pytest.mark.parametrize(
    ("count", "degree", "parts"),
    [
        (3, 1, {"w1": (3, 18, 64), "w2": (3, 16, 72)}),
        (3, 2, {"w1": (3, 36, 32), "w2": (3, 32, 36)}),
    ],
)
def test_no_rank_is_left_without_a_part(
    tmp_path: Path,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    degree: int,
    parts: dict[str, tuple[int, ...]],
) -> None:
    """Four ranks hold and write equal parts of each tensor, and train like one process."""
    monkeypatch.setattr(runs, "ENTRY_POINT", ("-m", "tests.training.support.sized"))
    monkeypatch.setenv("SIZED", json.dumps({"family": "mixtral", "n_expert": count, **SIZES}))
    alone = train(tmp_path / "alone", data, 0, 4, 3, "--model_name=sized")
    save = tmp_path / "spread"
    flags = ("--model_name=sized", "--low_cpu_fsdp=True", f"--tensor_parallel={degree}")
    assert train(save, data, 4, degree, 3, *flags) == pytest.approx(alone, abs=1e-5)
    written: Any = dcp.FileSystemReader(save / "checkpoints" / "step_3_ckp").read_metadata()
    for name, shape in parts.items():
        stored = written.state_dict_metadata[f"model.model.layers.0.mlp.experts.{name}"]
        assert [tuple(chunk.sizes) for chunk in stored.chunks] == [shape] * 4


def test_the_balance_loss_is_that_of_one_process(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"family": "mixtral", "n_expert": 4, "balance_coefficient": 0.1, **SIZES}
    monkeypatch.setattr(runs, "ENTRY_POINT", ("-m", "tests.training.support.sized"))
    monkeypatch.setenv("SIZED", json.dumps(sizes))
    flags = ("--model_name=sized", "--fsdp_activation_checkpointing=True")
    alone = train(tmp_path / "alone", data, 0, 4, 3, *flags)
    train(tmp_path / "shared", data, 2, 4, 3, *flags, "--tensor_parallel=2")
    assert losses(tmp_path / "shared") == pytest.approx(alone, abs=1e-5)


def test_experts_that_nothing_divides_are_cut_by_experts() -> None:
    model = build(MixtralConfig(**SIZES, n_expert=6))
    assert len(expert_placements(model, 4)) == 3 * 2
    assert not expert_placements(model, 3)  # two experts each
    assert not expert_placements(model, 5)
