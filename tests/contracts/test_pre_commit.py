"""The checks before a commit are those of `make lint`."""

from __future__ import annotations

from pathlib import Path

import yaml


def test_each_hook_is_a_part_of_make_lint(root: Path) -> None:
    config = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    recipe = (root / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    commands = {part.strip() for line in recipe.splitlines() for part in line.split("&&")}
    assert len(entries) >= 4 and set(entries) <= commands
