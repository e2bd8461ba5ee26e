"""The fenced blocks of the documentation, each marked with its language.

`sh` is what a reader types: its commands are checked (tests/contracts/test_page_commands.py), and
those that can run in a scratch folder are run (tests/contracts/test_page_runs.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TYPED = "sh"
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of the page after which it begins."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return every page written by people; docs/reference/ is written from the code."""
    written = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    docs = sorted(path for path in written if not path.startswith("docs/reference/"))
    return ["README.md", "CONTRIBUTING.md", "launch/README.md", *docs]


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a page in order: all of them, or those of one language."""
    text = (ROOT / page).read_text()
    found = (
        Block(page, text.count("\n", 0, one.start()) + 1, one[1], one[2])
        for one in _BLOCK.finditer(text)
    )
    return [one for one in found if language in (None, one.language)]


def type_in(text: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a block as a script in a folder, stopping at its first error; returns its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=1500,
    )
    said = done.stdout + done.stderr
    if done.returncode != 0:
        said += "".join(path.read_text() for path in sorted(folder.glob("slurm-*.out")))
        raise AssertionError(f"{text}\nexit code {done.returncode}\n{said}")
    return said
