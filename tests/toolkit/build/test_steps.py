"""Every step of every image is run by some test, and docs/targets.md says how each stage is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.stages import rehearsal

# make test-images and make quickstart build these from their own Dockerfiles.
BUILT = ("cpu-mamba", "smp-llama")


def dockerfile(root: Path, target: str) -> str:
    return (root / "tests" / "golden" / f"{target}.Dockerfile").read_text()


def steps(root: Path, target: str) -> set[str]:
    """The steps of an image, without what differs from target to target: its name, and sums."""
    text = dockerfile(root, target)
    found = re.findall(r"^(?:RUN|COPY) .*?[^\\]$", text, re.MULTILINE | re.DOTALL)
    return {re.sub(rf"\b[0-9a-f]{{64}}\b|\b{target}\b", "*", one) for one in found}


@pytest.mark.parametrize("target", [*rehearsal.TARGETS, *rehearsal.OTHERS])
def test_every_step_of_an_image_is_run(root: Path, target: str) -> None:
    run = set[str]().union(*(steps(root, one) for one in (*rehearsal.TARGETS, *BUILT)))
    assert steps(root, target) - run == set()


def test_every_target_is_looked_at(root: Path) -> None:
    golden = {path.stem for path in (root / "tests" / "golden").glob("*.Dockerfile")}
    assert golden == {*rehearsal.TARGETS, *rehearsal.OTHERS}


def test_the_page_says_of_each_stage_how_it_is_run(root: Path) -> None:
    page = (root / "docs" / "targets.md").read_text()
    _, _, section = page.partition("\n## What is run of an image\n")
    first = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    told = set(re.findall(r"`([\w-]+)`", " ".join(first)))
    stages = {
        stage
        for target in (*rehearsal.TARGETS, *rehearsal.OTHERS)
        for stage in re.findall(r"^FROM .* AS (\S+)$", dockerfile(root, target), re.MULTILINE)
    }
    assert stages == told
