"""SAVE/config.json: what ran, with every setting, and the versions of what ran it."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from training.config.config import Config
from training.errors import writing

PACKAGES = (
    *("torch", "triton", "mamba-ssm", "causal-conv1d", "flash-attn", "numpy"),
    *("safetensors", "datasets", "tokenizers", "transformers", "mosaicml"),
)
"""What a run's losses and speed may depend on, where it is installed."""


def write_resolved(config: Config, folder: Path, world_size: int) -> Path:
    """Write config.json: every setting with its value, and the versions that ran it."""
    record: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "world_size": world_size,
        "versions": versions(),
    }
    path = folder / "config.json"
    with writing(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def versions() -> dict[str, str]:
    """Tell the versions of what a run's losses and speed may depend on."""
    found = {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
