"""All targets of a step count the same, whatever micro-batch, rank and sharding they are in."""

from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch

from tests.composer.runs import PROGRAM, run, settings, write, write_packed
from tests.training.support.runs import losses, steps
from training.config.lr_schedule import learning_rate
from training.data.base import stacked
from training.systems.composer import yaml
from training.systems.composer.data import open_mixture
from training.systems.composer.model import TOPS, MambaModel, measure


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with micro-batches of 1, 2 and 4 on two ranks, and of 8 and 2 on one."""
    folder = tmp_path_factory.mktemp("runs")
    write_packed(folder)

    def make(name: str, size: int) -> str:
        length = {"scheduler__t_max": "3ba", "scheduler__t_decay": "1ba"}
        given = settings(folder, folder / name, data__micro_batch_size=size, **length)
        given["trainer"]["save_interval"] = "1ba"
        return write(folder / f"{name}.yaml", given)

    done = run(2, *(make(f"2x{size}", size) for size in (1, 2, 4)), program=PROGRAM)
    assert done.returncode == 0, done.stderr
    (folder / "moved").mkdir()
    copyfile(folder / "2x2" / "ep0-ba1-rank0.pt", folder / "moved" / "ep0-ba1-rank0.pt")
    alone = make("1x8", 8), make("1x2", 2), make("moved", 4)
    done = run(0, *alone, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    return folder


LAYOUTS = ("2x1", "2x2", "2x4", "1x2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_do_not_depend_on_the_layout(runs: Path, layout: str) -> None:
    found, wanted = steps(runs / layout), steps(runs / "1x8")
    assert [one["step"] for one in found] == [1, 2, 3]
    for one, other in zip(found, wanted, strict=True):
        for what in ("loss", "grad_norm"):
            assert one[what] == pytest.approx(other[what], rel=1e-5)
    # After the first step, AdamW's mean of gradients is 1 - beta1 times the gradients.
    for name, mean in _means(runs / "1x8").items():
        torch.testing.assert_close(_means(runs / layout)[name], mean, rtol=1e-5, atol=1e-8)


def test_a_run_of_two_ranks_goes_on_with_one(runs: Path) -> None:
    found = steps(runs / "moved")
    assert [one["step"] for one in found] == [2, 3]
    assert [one["loss"] for one in found] == pytest.approx(losses(runs / "1x8")[1:], rel=1e-5)


def test_the_first_loss_is_the_mean_over_the_targets_of_the_step(runs: Path) -> None:
    config = yaml.read(runs / "1x8.yaml")
    mixture = open_mixture(config)
    batch = stacked([mixture[number] for number in range(8)])
    logits = MambaModel(config, sharded=False).model(batch.inputs)  # (b, l, v)
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
    )  # (b * l)
    assert batch.weights is not None
    weights = batch.weights.flatten()  # (b * l)
    assert 0 < (weights == 0).sum() < len(weights), "all count alike: the test shows nothing"
    assert losses(runs / "1x8")[0] == pytest.approx(
        ((each * weights).sum() / weights.sum()).item(), rel=1e-5
    )


def test_the_rates_are_those_of_our_schedule(runs: Path) -> None:
    config = yaml.read(runs / "1x8.yaml")
    assert [one["learning_rate"] for one in steps(runs / "1x8")] == [
        learning_rate(config.schedule, step, 3, config.optimizer.lr, config.tokens_per_step)
        for step in (1, 2, 3)
    ]
    assert [one["tokens_seen"] for one in steps(runs / "1x8")] == [264, 528, 792]  # 8 x 33 each


def test_sharded_blocks_that_are_recomputed_give_the_same_losses(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(runs, runs / "sharded", scheduler__t_max="3ba", scheduler__t_decay="1ba")
    monkeypatch.setenv("SHARDED", "1")
    done = run(2, write(runs / "sharded.yaml", given), program=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "(0-1): 2 x FullyShardedDataParallel" in done.stderr, "not block by block"
    assert "CheckpointWrapper" in done.stderr
    assert losses(runs / "sharded") == pytest.approx(losses(runs / "1x8"), rel=1e-5)


def test_what_is_measured() -> None:
    logits = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(1))  # (b, l, v)
    targets = torch.arange(10).reshape(2, 5)  # (b, l)
    targets[1, 2:] = -100
    count, loss, *hits = measure(logits, targets).tolist()
    rows, wanted = logits.flatten(0, 1)[:7], targets.flatten()[:7]
    assert count == 7
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(rows, wanted).item() * 7)
    assert hits == [
        sum(int(t in row.topk(top).indices) for row, t in zip(rows, wanted, strict=True))
        for top in TOPS
    ]


def _means(save: Path) -> dict[str, Any]:
    """Return AdamW's means of gradients after the first step, by parameter."""
    held = torch.load(save / "ep0-ba1-rank0.pt", weights_only=False)
    state = held["state"]["optimizers"]["AdamW"]["state"]
    return {name: one["exp_avg"] for name, one in state.items()}
