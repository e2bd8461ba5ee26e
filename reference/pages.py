"""The list of pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from reference import commands, exit_codes, metrics, recipe_keys, training_settings

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": commands.text,
    "recipe-keys.md": recipe_keys.text,
    "settings.md": training_settings.text,
    "exit-codes.md": exit_codes.text,
    "metrics.md": metrics.text,
}
