"""What can be learned from tags, a resolver's messages and a recipe's comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.outdated.names import Offer, comments, newest, parse_offers, reason


@pytest.mark.parametrize(
    ("pinned", "names", "wanted"),
    [
        ("v1.2.0.post1", ["v1.1.0", "v1.2.0.post2", "v2.3.0", "v2.4.0rc1", "nightly"], "v2.3.0"),
        ("v2.20.3-1", ["v2.9.9-1", "v2.28.3-1", "v2.28.3-2"], "v2.28.3-2"),
        ("v1.9.1-aws", ["v1.10.0-aws", "v1.17.2", "v1.11.0-aws-rc1"], "v1.10.0-aws"),
        ("release/2.2.x", ["release/2.1.x", "release/3.10.x", "release/3.5.x"], "release/3.10.x"),
        (
            "12.1.1-base-ubuntu22.04",
            ["12.1.1-devel-ubuntu22.04", "13.0.1-base-ubuntu24.04", "13.2.0-base-ubi9"],
            "13.0.1-base-ubuntu24.04",
        ),
        ("22.04", ["latest", "24.04", "devel", "noble-20250101"], "24.04"),
        ("v2.0.0rc1", ["v2.0.0rc2"], "v2.0.0rc2"),
        ("bookworm-slim", ["trixie-slim", "13-slim"], "bookworm-slim"),
        ("main", ["master", "v1"], "main"),
        ("v3", [], "v3"),
    ],
)
def test_the_newest_is_named_as_the_pin_is(pinned: str, names: list[str], wanted: str) -> None:
    assert newest(pinned, [*names, pinned]) == wanted
    assert newest(pinned, names) == wanted


def test_an_offer_says_which_python_it_takes() -> None:
    said = """\
numpy==2.2.6 ; python_full_version < '3.11'
numpy==2.4.6 ; python_full_version == '3.11.*'
numpy==2.5.5 ; python_full_version >= '3.12'
Some_Name[extra]==1.0
windows==1.0 ; sys_platform == 'win32'
chip==1.0 ; platform_machine == 'aarch64'
"""
    known = {
        "numpy": (Offer("2.2.6"), Offer("2.4.6", "3.11"), Offer("2.5.5", "3.12")),
        "some-name": (Offer("1.0"),),
    }
    assert parse_offers(said, "3.10", "x86_64") == known
    assert parse_offers(said, "3.10", "aarch64") == {**known, "chip": (Offer("1.0"),)}


UV = """\
  \u00d7 No solution found when resolving dependencies:
  ╰─▶ Because torch==2.2.2 depends on triton{sys_platform ==
      'linux'}==2.2.0 and you require triton==3.8.0, we can conclude that your
      requirements and torch==2.2.2 are incompatible.
      And because you require torch==2.2.2, we can conclude that ...
"""
OTHER = """\
error: No solution found when resolving dependencies
  cause: Because a==2 depends on b>=3 and you require b==1, we can conclude that a is not.
"""


def test_a_reason_is_the_first_that_the_resolver_gives() -> None:
    assert reason(UV, "triton==3.8.0") == "torch==2.2.2 depends on triton==2.2.0"
    assert reason(OTHER, "a==2") == "a==2 depends on b>=3 and the recipe has b==1"
    assert reason("something else", "a==2") == "something else"


def test_comments_are_those_beside_a_value() -> None:
    text = """\
# above
python:                       # of a key
  installer: pip==25.3        # runs from its wheel
  packages:
    - numpy==1.26.4           # torch 2.2 is built for NumPy 1
    - torch==2.2.2
    - odd==1.0#no-comment
sources:
  nccl: {git: "https://x.test/a#b", ref: v1}   # the last with X
"""
    assert comments(text) == {
        (("python", "installer"), "pip==25.3"): "runs from its wheel",
        (("python", "packages"), "numpy==1.26.4"): "torch 2.2 is built for NumPy 1",
        (("sources", "nccl", "git"), "https://x.test/a#b"): "the last with X",
        (("sources", "nccl", "ref"), "v1"): "the last with X",
    }


def test_the_comments_of_our_recipes_are_found(root: Path) -> None:
    found = comments((root / "recipes" / "cuda-mamba.yaml").read_text())
    assert found[("python", "packages"), "numpy==1.26.4"] == "torch 2.2 is built for NumPy 1"
