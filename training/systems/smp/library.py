"""Whether SMP v2's library, torch.sagemaker, is here. Light: torch is looked at, not loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def is_installed() -> bool:
    """Tell whether torch has the library in it."""
    torch = find_spec("torch")
    places = torch.submodule_search_locations if torch else None
    return any((Path(place) / "sagemaker").is_dir() for place in places or ())
