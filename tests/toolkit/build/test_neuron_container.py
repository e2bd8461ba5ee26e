"""The recipe on AWS's own Neuron container, as printed on the page of neuron29-mamba2."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sqshforge import lock, recipe
from sqshforge.build import dockerfile
from sqshforge.network.mirrors import Mirrors
from tests.support.web_servers import Index, asking, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture

pytestmark = pytest.mark.processes

PAGE = "docs/images/targets/neuron29-mamba2.md"
REPOSITORY = "public.ecr.aws/neuron/pytorch-training-neuronx"


@pytest.fixture
def recipes(root: Path, tmp_path: Path) -> Path:
    """The recipes, including the page's one, added as the page says."""
    folder = tmp_path / "recipes"
    shutil.copytree(root / "recipes", folder)
    block = re.search(r"```yaml\n(.*?)```", (root / PAGE).read_text(), re.DOTALL)
    assert block is not None
    (folder / "neuron-container.yaml").write_text(block[1])
    return folder


@pytest.mark.parametrize(
    ("values", "tag", "python"),
    [
        ({}, "2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04", "3.12"),
        (None, "2.5.1-neuronx-py310-sdk2.21.1-ubuntu22.04", "3.10"),
    ],
)
def test_it_renders_for_both_sdks(
    root: Path,
    recipes: Path,
    new_index: Callable[..., Index],
    values: dict[str, str] | None,
    tag: str,
    python: str,
) -> None:
    if values is None:  # the one setting that the page only names
        setting = re.search(r'SET="(tag=2\.5\.1[^"]*)"', (root / PAGE).read_text())
        assert setting is not None
        values = dict(word.split("=", 1) for word in setting[1].split())
    index = new_index(wheel("pyyaml", "6.0.1"), wheel("pip", "25.3"))
    nowhere = Mirrors(images={"public.ecr.aws/": "127.0.0.1:1/"})
    what = recipe.find("neuron-container", recipes)
    locked = lock.resolve(what, asking(recipes.parent, index.pip, nowhere))
    assert [one.name for one in locked.python.packages] == ["pyyaml"]
    chosen = recipe.find("neuron-container", recipes, values)
    text = dockerfile.dockerfile(chosen, lock.set_by_hand(locked, what, chosen), root / "images")
    assert f"ARG BASE={REPOSITORY}:{tag}\n" in text
    assert f"&& python{python} /run/wheels/pip-25.3" in text
    assert "neuronx-cc" not in text  # the container's own one is kept
    assert f'PYTORCH_VERSION="{tag.partition("-")[0]}"' in text
    assert chosen.site == f"/usr/local/lib/python{python}/site-packages"
