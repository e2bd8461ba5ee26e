"""Run the kernels' tests on NKI if it is installed, else on the model of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest

from tests.training.ops.nki import model
from tests.training.ops.nki.model import beta

KERNELS = "training.ops.nki"


@pytest.fixture(params=["nki", "neuronxcc"])
def namespace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Import the kernels anew with this namespace, and forget them after the test."""
    installed = [name for name in ("nki", "neuronxcc") if find_spec(name)]
    if installed and request.param not in installed:
        pytest.skip(f"{request.param} is not the NKI that is installed")
    if not installed:
        modules = model.modules() if request.param == "nki" else beta.modules()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
    if request.param == "neuronxcc":
        for name in ("nki", "nki.isa"):
            monkeypatch.setitem(sys.modules, name, None)  # makes its import fail
    before = _kernels_taken()
    yield request.param
    _kernels_taken()
    sys.modules.update(before)


def _kernels_taken() -> dict[str, ModuleType]:
    """Remove the kernels from the imported modules, and return them."""
    names = [one for one in sys.modules if one == KERNELS or one.startswith(f"{KERNELS}.")]
    return {name: sys.modules.pop(name) for name in names}
