"""Every step of every image is run by some test; docs/images/targets.md says how, by stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.stages import rehearsal

# `make test-images` and `make quickstart` build these from their own Dockerfiles.
BUILT = ("cpu-mamba", "cuda-mamba-ubuntu", "smp-llama")
GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = sorted(path.name.removesuffix(".Dockerfile") for path in GOLDEN.glob("*.Dockerfile"))


def dockerfile(name: str) -> str:
    return (GOLDEN / f"{name}.Dockerfile").read_text()


def steps(name: str) -> set[str]:
    """Return an image's steps without its name, checksums, and the platform in cache names.

    `name` is a target's, followed by the platform's if the target has several.
    """
    text = re.sub(r"(?:\.arm64)?-[0-9a-f]{12},target=/build", "-*,target=/build", dockerfile(name))
    found = re.findall(r"^(?:RUN|COPY) .*?[^\\]$", text, re.MULTILINE | re.DOTALL)
    target = name.partition(".")[0]
    return {re.sub(rf"\b[0-9a-f]{{64}}\b|\b{target}\b", "*", one) for one in found}


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_an_image_is_run(name: str) -> None:
    """For one platform at least: the steps of the others are the same."""
    run = set[str]().union(*(steps(one) for one in (*rehearsal.TARGETS, *BUILT)))
    assert steps(name) - run == set()


def test_every_target_is_looked_at() -> None:
    targets = {name.partition(".")[0] for name in NAMES}
    assert targets == {*rehearsal.TARGETS, *rehearsal.OTHERS}


def test_the_page_says_of_each_stage_how_it_is_run(root: Path) -> None:
    page = (root / "docs" / "images" / "targets.md").read_text()
    _, _, section = page.partition("\n## What is run of an image\n")
    first = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    shown = set(re.findall(r"`([\w-]+)`", " ".join(first)))
    stages = {
        stage
        for target in (*rehearsal.TARGETS, *rehearsal.OTHERS)
        for stage in re.findall(r"^FROM .* AS (\S+)$", dockerfile(target), re.MULTILINE)
    }
    assert stages == shown
