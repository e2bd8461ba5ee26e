"""docs/start/own-data.md by copy and paste: from texts with splits to text from a trained model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page_blocks import TYPED, blocks, type_in
from tests.support.site import Site
from tests.support.slurm import Cluster, cluster

pytestmark = [pytest.mark.processes, pytest.mark.root]

WORDS = "the quick brown fox jumps over a lazy dog while it rains and nobody looks"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.fixture
def texts(project: Path) -> Path:
    """A folder of the reader's own texts."""
    texts = project / "mine" / "texts"
    texts.mkdir(parents=True)
    for name, begin, count in (("train", 0, 900), ("validation", 900, 60)):
        lines = (json.dumps({"text": text(number)}) for number in range(begin, begin + count))
        (texts / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return texts


def text(number: int) -> str:
    words = WORDS.split()
    return " ".join(words[(number + at) % len(words)] for at in range(40)) + "."


@pytest.mark.usefixtures("texts")
def test_from_texts_to_a_trained_model(project: Path, root: Path, slurm: Cluster) -> None:
    *typed, _on_gpus = blocks("docs/start/own-data.md", TYPED)
    assert len(typed) == 7
    site = Site(slurm, project / "build" / "cpu-mamba.sqsh", project, root)
    shell = {**slurm.env, "OMP_NUM_THREADS": "1"}
    said = [type_in(block.text, project, shell) for block in typed]
    log = "".join(path.read_text() for path in project.glob("slurm-*.out"))
    assert "train.jsonl" in said[1] and "validation.jsonl" in said[1]
    assert "1: training.launch: node 1 of 2" in log
    losses = [loss for _, loss in site.losses("checkpoints/llama_fsdp-trial")]
    assert len(losses) == 40 and losses[-1] < 0.7 * losses[0]
    records = (project / "checkpoints/llama_fsdp-trial/metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in records]
    assert kinds.count("evaluation") == 2
    assert (project / "mine/run/metrics.jsonl").read_text().count('"step"') > 1
    assert (project / "mine/report/report.html").stat().st_size > 10_000
    assert json.loads((project / "mine/model/config.json").read_text())["vocab_size"] == 1024
    assert len(set(re.findall(r"\w+", said[6])) & set(WORDS.split())) >= 3, said[6]
