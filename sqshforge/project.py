"""Where things lie in a checkout of this project."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError


@dataclass(frozen=True)
class Project:
    """A checkout: recipes and templates to build from, and the folder that results go to."""

    root: Path

    @property
    def recipes(self) -> Path:
        return self.root / "recipes"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    def bundle(self, target: str) -> Path:
        """What a target's build takes from outside, gathered in one folder."""
        return self.build / "vendor" / target

    def sqsh(self, target: str) -> Path:
        return self.build / f"{target}.sqsh"


def find() -> Project:
    """The checkout that this package runs from; `MissingError` for a copy without one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "recipes").is_dir() or not (root / "images").is_dir():
        raise MissingError(
            "recipes/ and images/ are not beside the sqshforge package",
            where=str(root),
            mend="run sqshforge from a checkout of the project (pip install -e .)",
        )
    return Project(root)
