"""Losses depend only on the global batch: not on ranks, sharding, engine or accumulation."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.training.support import matrix
from tests.training.support.curves import FAMILIES
from tests.training.support.runs import ENGINES, run, write_text

pytestmark = pytest.mark.processes

Found = Mapping[int, Mapping[str, list[float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The losses, by number of processes."""
    data = write_text(tmp_path_factory.mktemp("text"))
    losses: dict[int, Any] = {}
    for ranks in matrix.CASES:
        save = tmp_path_factory.mktemp(f"ranks{ranks}")
        done = run(
            ranks, data, str(save), program=("-m", "tests.training.support.matrix"), timeout=600
        )
        assert done.returncode == 0, done.stderr
        losses[ranks] = json.loads((save / "losses.json").read_text())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sharding", matrix.SHARDINGS)
def test_losses_are_those_of_one_process(
    found: Found, family: str, engine: str, sharding: str
) -> None:
    alone = found[1][matrix.case(family, ENGINES[0], "ddp", 1)]
    assert len(alone) == matrix.STEPS and alone[-1] < alone[0]
    for ranks, cases in matrix.CASES.items():
        for way, accumulation in cases:
            if way == sharding:
                losses = found[ranks][matrix.case(family, engine, sharding, accumulation)]
                assert losses == pytest.approx(alone, abs=1e-5), (ranks, accumulation)
