"""The site of docs/ is built without a warning, and links that leave docs/ work on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reference.site import OUTSIDE, relinked, unescaped

PUBLISHED = "https://example.org/owner/name"


@pytest.mark.processes
def test_it_is_built_strictly(root: Path, tmp_path: Path) -> None:
    words = ["build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    assert 'href="project/launch/"' in index and 'href="reference/cli/"' in index
    fetched = re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(https?:[^"]*)"', index)
    assert not fetched, "a page fetches something from elsewhere"


def test_every_page_is_in_the_navigation(root: Path) -> None:
    named = set(re.findall(r"^ +- ([\w./-]+\.md)$", (root / "mkdocs.yml").read_text(), re.M))
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    assert pages == {one for one in named if not one.startswith("project/")}
    assert {one for one in named if one.startswith("project/")} <= {f"project/{x}" for x in OUTSIDE}


@pytest.mark.parametrize(
    "page, text, shown",
    [
        ("images/lock.md", "[a](recipes.md#x)", "[a](recipes.md#x)"),
        ("images/lock.md", "[a](../start/machines.md)", "[a](../start/machines.md)"),
        ("images/lock.md", "[a](../../launch/README.md#x)", "[a](../project/launch/README.md#x)"),
        (
            "project/launch/README.md",
            "[a](../docs/training/nodes.md)",
            "[a](../../training/nodes.md)",
        ),
        ("project/CONTRIBUTING.md", "[a](ARCHITECTURE.md)", "[a](ARCHITECTURE.md)"),
        ("README.md", "[`a`](../setup.sh)", "`a`"),
        ("README.md", "```\n[a](../setup.sh)\n```", "```\n[a](../setup.sh)\n```"),
        ("README.md", "[a](https://example.org)", "[a](https://example.org)"),
        (
            "background/performance.md",
            "![a](../../benchmarks/results/pack.png)",
            "![a](../project/benchmarks/results/pack.png)",
        ),
    ],
)
def test_links_of_a_checkout_on_the_site(page: str, text: str, shown: str) -> None:
    assert relinked(text, page, None) == shown


def test_code_is_linked_where_the_checkout_is_published() -> None:
    text = "[a](../../training/compat.py#L3), [b](../../configs)"
    assert relinked(text, "training/data.md", PUBLISHED) == (
        f"[a]({PUBLISHED}/blob/main/training/compat.py#L3), [b]({PUBLISHED}/blob/main/configs)"
    )


def test_a_bar_in_a_table_is_shown_without_its_backslash() -> None:
    assert unescaped("| `a\\|b` | c |\n`a\\|b`") == "| `a|b` | c |\n`a\\|b`"
