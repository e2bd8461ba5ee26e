"""The targets to build, and the table in docs/images/targets.md of their sizes and times."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.support import vendor_bases
from tests.support.page_tables import PageTable

# cuda-mamba comes before smp-llama, because it stands in for that one's base.
TARGETS = (
    "cuda-mamba",
    "smp-llama",
    "composer-mamba",
    "llama-fsdp",
    "neuron-mamba2",
    "neuron29-mamba2",
)
# They compile CUDA kernels, a quarter of an hour per architecture: all of them would take over an
# hour.
WHERE_NAMED = ("cuda13-mamba",)
COLUMNS = ("image", "packed", "build", "pack", "smoke test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Build what IMAGES names, such as IMAGES="llama-fsdp cuda13-mamba"; by default `TARGETS`."""
    if "made" not in metafunc.fixturenames:
        return
    asked = os.environ.get("IMAGES", "").split()
    unknown = set(asked) - {*TARGETS, *WHERE_NAMED}
    assert not unknown, f"IMAGES: unknown: {', '.join(sorted(unknown))}"
    if "smp-llama" in asked:
        asked.append("cuda-mamba")
    chosen = [one for one in (*TARGETS, *WHERE_NAMED) if one in asked] if asked else TARGETS
    metafunc.parametrize("made", chosen, indirect=True, scope="module")


@pytest.fixture(scope="session")
def results() -> Iterator[PageTable]:
    """What was built; written into the table in docs/images/targets.md at the end."""
    rows = [(target, vendor_bases.LACKING[target]) for target in (*TARGETS, *WHERE_NAMED)]
    found = PageTable("test-images", ("target", "without"), COLUMNS, rows)
    yield found
    found.write(ROOT / "docs" / "images" / "targets.md")
