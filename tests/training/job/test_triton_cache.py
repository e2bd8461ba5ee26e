"""Compiled kernels from one job to the next: copied whole, safely shared, never an obstacle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.job import triton_cache


def cache(folder: Path, *keys: str) -> Path:
    for key in keys:
        (folder / key).mkdir(parents=True)
        (folder / key / "kernel.cubin").write_bytes(key.encode() * 1000)
    return folder


def test_a_job_begins_with_the_kernels_of_the_image(tmp_path: Path) -> None:
    seed = cache(tmp_path / "image", "a", "b")
    said = triton_cache.begin(tmp_path / "job", {}, in_image=seed)
    assert said == f"2 compiled kernels from {seed}"
    assert (tmp_path / "job/b/kernel.cubin").read_bytes() == b"b" * 1000


def test_a_folder_that_is_named_comes_before_the_image(tmp_path: Path) -> None:
    image, named = cache(tmp_path / "image", "a"), cache(tmp_path / "named", "n")
    triton_cache.begin(tmp_path / "job", {triton_cache.SEED: str(named)}, in_image=image)
    assert [key.name for key in (tmp_path / "job").iterdir()] == ["n"]


def test_a_named_folder_that_is_not_there_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    said = triton_cache.begin(tmp_path / "job", {triton_cache.SEED: "/no/such"})
    assert said == "TRITON_CACHE_SEED=/no/such does not exist: kernels are compiled anew"
    assert triton_cache.begin(tmp_path / "job", {}, in_image=tmp_path / "none") == ""


def test_kernels_are_kept_for_the_next_job_and_what_is_there_stays(tmp_path: Path) -> None:
    place = cache(tmp_path / "kept", "a")
    (place / "a/kernel.cubin").write_bytes(b"first")
    job = cache(tmp_path / "job", "a", "b")
    (job / "b" / "x.tmp.pid_1_2").write_bytes(b"half")
    assert (
        triton_cache.keep(job, {triton_cache.SAVE: str(place)})
        == f"1 compiled kernels kept in {place}"
    )
    assert (place / "a/kernel.cubin").read_bytes() == b"first"
    assert [file.name for file in (place / "b").iterdir()] == ["kernel.cubin"]
    assert triton_cache.keep(job, {}) == ""


def test_many_that_keep_the_same_leave_it_whole(tmp_path: Path) -> None:
    job, place = cache(tmp_path / "job", *"abcdef"), tmp_path / "kept"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: triton_cache.keep(job, {triton_cache.SAVE: str(place)}), range(16)))
    assert sorted(key.name for key in place.iterdir()) == list("abcdef")
    for key in place.iterdir():
        assert (key / "kernel.cubin").read_bytes() == key.name.encode() * 1000
