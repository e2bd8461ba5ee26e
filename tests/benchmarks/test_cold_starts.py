"""How cold starts are measured: a server with a latency, and docs/background/cold-start.md."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks import delta, first_step, pages, start
from benchmarks.cold import page
from benchmarks.cold.served import Request, busiest, distinct, served
from benchmarks.options import RESULTS, ROOT
from benchmarks.scale import facts, staging, study
from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs

PAGE = start.PAGE.read_text()

# The rows of hot.json, and what docs/background/scale.md has of each.
COUNTED = {
    "folder order": "{requests} requests for {read:.0f} MB, ask for {asked:.0f} GB/s and have it "
    "after {after:.1f} s",
    "hot first": "{requests} requests for {read:.0f} MB: {asked:.0f} GB/s, after {after:.1f} s",
}


def result(name: str) -> dict[str, Any]:
    """What was measured; without rows where nothing was, as the page then says."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else dict(page.NONE)
    return found


@pytest.mark.processes
def test_a_file_behind_a_server_is_the_same_and_each_read_of_it_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 << 20))
    with served(file, 0, Programs()) as behind:
        assert behind.path.read_bytes() == file.read_bytes()
        first = behind.requests()
        assert sum(one.length for one in first) == 3 << 20
        assert abs(first[-1].at - time.time()) < 600
        behind.path.read_bytes()
        assert behind.requests() == first  # the kernel had it
        folder = behind.path.parent
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.processes
def test_each_request_takes_at_least_the_latency(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    with served(file, 500, Programs()) as behind:
        since = time.monotonic()
        with behind.path.open("rb", buffering=0) as opened:
            opened.read(1)
        assert time.monotonic() - since >= 0.5


@pytest.mark.processes
def test_a_file_that_is_not_there_is_not_served(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkError, match="nbdkit does not come up"),
        served(tmp_path / "none", 0, Programs()),
    ):
        raise AssertionError


def test_the_busiest_second() -> None:
    times = {0.0: 1, 0.9: 2, 1.5: 4, 1.8: 8, 9.0: 5}  # and bytes
    requests = [Request(at, 0, length) for at, length in times.items()]
    assert busiest(requests) == (14, 3)
    assert busiest([]) == (0, 0)


def test_what_is_read_again_does_not_count() -> None:
    requests = [Request(0.0, 0, 8192), Request(1.0, 4096, 8192), Request(2.0, 0, 4096)]
    assert distinct(requests) == [Request(0.0, 0, 8192), Request(1.0, 8192, 4096)]


def row(**values: Any) -> dict[str, Any]:
    axes = {
        "target": "cpu-mamba",
        "level": 3,
        "block": "1M",
        "order": "hot",
        "reader": "kernel",
        "latency_ms": 0,
    }
    return {**axes, "file_bytes": 9, "bytes": 1, "requests": 1, **values}


def test_a_part_that_is_measured_again_replaces_its_rows_and_no_others() -> None:
    other = row(target="cuda-mamba")
    old = {
        "images": {"cpu-mamba": "a", "cuda-mamba": "c"},
        "rows": [row(seconds=2.0), row(block="128K"), other],
    }
    new = {"images": {"cpu-mamba": "a"}, "rows": [row(bytes=5)]}
    found = start.merged(old, new)
    assert found["rows"] == [row(block="128K"), row(bytes=5, seconds=2.0), other]
    assert found["images"] == old["images"]
    found = start.merged(old, {**new, "images": {"cpu-mamba": "b"}})
    assert found["rows"] == [row(bytes=5), other]
    assert found["images"] == {"cpu-mamba": "b", "cuda-mamba": "c"}


def test_the_pages_have_the_tables_of_the_results() -> None:
    tables = {
        **page.tables(result("start")),
        "first step": first_step.shown(result("first_step")),
    }
    assert pages.fill(PAGE, tables) == PAGE
    sent = delta.PAGE.read_text()
    assert pages.fill(sent, {"delta": delta.shown(result("delta"))}) == sent


def test_what_docs_scale_says_of_a_thousand_nodes() -> None:
    _, servers = study.image_rates(facts.STRIPES.value)
    said = (ROOT / "docs" / "background" / "scale.md").read_text().replace("\n  ", " ")
    for of, form in COUNTED.items():
        read, requests = (result("hot")["rows"][of][name] for name in ("read", "requests"))
        rate = page.node_rate(read, requests)
        after = staging.shared_seconds(page.NODES, read, rate, servers)
        asked = page.NODES * rate / 1e9
        assert form.format(requests=requests, read=read / 1e6, asked=asked, after=after) in said


def test_the_part_of_the_file_that_the_models_take_is_what_was_measured() -> None:
    wanted = {"target": "cpu-mamba", "block": page.BLOCK, "order": "walk", "latency_ms": 0}
    parts = {
        one["reader"]: (one["bytes"], one["file_bytes"])
        for one in result("start")["rows"]
        if wanted.items() <= one.items()
    }
    read, size = parts["kernel"]
    assert round(read / size, 2) == facts.MOUNTED.value
    measured = f"of {size / 1e6:.0f} MB of cpu-mamba.sqsh a start of training asks the server for "
    assert f"{measured}{read / 1e6:.0f} MB" in facts.MOUNTED.source
    assert f"{parts['squashfuse'][0] / 1e6:.0f} MB by squashfuse" in facts.MOUNTED.source
    said = (ROOT / "docs" / "background" / "scale.md").read_text()
    assert f": {facts.MOUNTED.value:.0%} of cpu-mamba.sqsh".replace("%", " %") in said


def test_two_levels_of_one_block_size_have_a_place_each() -> None:
    """Bars of one place and order lie over each other, and the title compares within a place."""
    measured = [row(level=level, order=order) for level in (3, 15) for order in ("walk", "hot")]
    axes = Figure().subplots()
    page._bars(axes, measured, [10.0, 5.0, 8.0, 2.0], "MB read", "kernel")
    assert len({round(one.get_window_extent().x0) for one in axes.patches}) == len(measured)
    assert axes.get_title() == "Hot files first: 50% to 75% less (MB read)"


def test_what_a_start_that_reads_ahead_takes_of_its_goals() -> None:
    warm = row(order="warm", latency_ms=1, seconds=6.0, range_seconds=2.0, memory_seconds=3.0)
    rows = [warm, row(order="walk", latency_ms=1, seconds=10.0)]
    text = page.reading_ahead({"rows": rows})
    assert (
        "| cpu-mamba | zstd 3, 1M | kernel | 6 s | 2 s | 3 s | 10 s | 1.200, met | 0.600, missed |"
    ) in text
    assert page.reading_ahead({"rows": rows[:1]}) == page.MISSING


def test_a_result_becomes_tables_and_a_picture(tmp_path: Path) -> None:
    rows = [row(seconds=3.21), row(latency_ms=5, seconds=9.0), row(order="walk", bytes=2)]
    measured = {"rows": rows}
    text = page.times(measured)
    assert "| order | kernel: 0, 5 ms |" in text
    assert "| cpu-mamba | zstd 3, 1M | hot files first | 3.2, 9.0 |" in text
    goals = "| cpu-mamba | zstd 3, 1M | kernel | 0.500, met | 1.000, missed | 1.000, met |"
    assert goals in page.goals(measured)
    (tmp_path / "page.md").write_text(PAGE)
    page.write(tmp_path / "page.md", measured)
    assert page.times(measured) in (tmp_path / "page.md").read_text()
    assert (tmp_path / page.PICTURE).stat().st_size > 4_000
