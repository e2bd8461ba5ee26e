"""Every image that trains has the libraries that the flags of the training code need."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from sqshforge import lock, recipe
from tests.conftest import ROOT

ASKED_FOR_BY = {
    "aiohttp": "--dataset_path=stream:https://",
    "datasets": "--dataset_path=stream:",
    "fsspec": "--mirror_url",
    "huggingface-hub": "--init_hub",
    "numpy": "--dataset_path=packed:",
    "pyarrow": "--dataset_path=FOLDER",
    "pyyaml": "--config",
    "s3fs": "--mirror_url=s3://",
    "safetensors": "--init_weights",
    "tensorboard": "--tensorboard_dir",
    "tokenizers": "--tokenizer",
    "torch": "everything",
    "tqdm": "--progress",
    "wandb": "--use_wandb",
    "zstandard": "--dataset_path=stream:TEXTS.jsonl.zst",
}
OF_ONE_SYSTEM = {
    "mosaicml": ["composer-mamba"],
    "torchmetrics": ["composer-mamba"],
    "torch-xla": ["neuron-mamba2", "neuron29-mamba2"],
}
GOES_WITHOUT = {
    *("causal-conv1d", "flash-attn", "mamba-ssm", "triton", "transformer-engine", "torchao"),
    *("neuronx-cc", "nki"),  # kernels: a missing one is reported, and torch computes instead
    "matplotlib",  # only for training.report, outside of any run: its error says how to install it
    "transformers",  # tokenizers can ask the hub too; SMP's own image has the model under SMP
}
OF_THE_BASE = {"smp-llama"}
"""Targets whose base brings its own packages, none of which is replaced."""
DISTRIBUTIONS = {"composer": "mosaicml", "neuronxcc": "neuronx-cc", "yaml": "pyyaml"}


def imported() -> Iterator[str]:
    """Yield the distributions that the training code imports in any way."""
    for path in sorted((ROOT / "training").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "training"]
            elif isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                first = node.args[0]
                if called in ("library", "import_module", "find_spec") and (
                    isinstance(first, ast.Constant) and isinstance(first.value, str)
                ):
                    names = [first.value]
            for name in names:
                root = name.partition(".")[0]
                if root not in sys.stdlib_module_names and root != "training":
                    yield DISTRIBUTIONS.get(root, root.replace("_", "-"))


def locked(target: str) -> set[str]:
    python = lock.read(target, ROOT / "recipes").python
    bound = (one for index in python.bound for one in index.packages)
    return {one.name for one in (*python.packages, *bound)}


def trains() -> list[str]:
    every = recipe.targets(ROOT / "recipes")
    return [name for name in every if recipe.find(name, ROOT / "recipes").launchers]


def test_every_library_that_is_imported_is_accounted_for() -> None:
    known = {*ASKED_FOR_BY, *OF_ONE_SYSTEM, *GOES_WITHOUT}
    assert set(imported()) - known == set(), "say here which image has it"


@pytest.mark.parametrize("target", trains())
def test_no_image_refuses_its_own_flags(target: str) -> None:
    if target in OF_THE_BASE:
        page = (ROOT / "docs" / "images" / "targets" / f"{target}.md").read_text()
        missing = {name for name in ("s3fs", "tensorboard", "wandb") if name not in page}
        assert not missing, f"its page does not say where these are: {missing}"
        return
    there = locked(target)
    refused = {flag: name for name, flag in ASKED_FOR_BY.items() if name not in there}
    assert refused == {}
    assert {name for name, targets in OF_ONE_SYSTEM.items() if target in targets} <= there
