"""Every family learns a text as it did when its curve was written."""

import json
from pathlib import Path

import pytest

from tests.training.support import curves
from training.models import FAMILIES

pytestmark = pytest.mark.processes


def test_every_family_has_a_curve() -> None:
    assert set(curves.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", curves.FAMILIES)
def test_the_curve_is_the_golden_one(family: str, tmp_path: Path) -> None:
    golden = json.loads((curves.GOLDEN / f"{family}.json").read_text())
    found = curves.train(family, tmp_path)
    assert len(found) == 60
    # Processors and torch releases round differently, and each step carries that on.
    assert found == pytest.approx(golden, abs=5e-3)
