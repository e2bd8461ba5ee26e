"""What checkpoints and data sets ask of a file system: formulas beside the real thing."""

from __future__ import annotations

import mmap
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as listed
from torch.distributed.checkpoint.filesystem import _StorageInfo

from benchmarks.scale import facts, reading
from training.data import files as opened_files
from training.data.packed import Packed, PackedWriter


def test_a_checkpoints_list_has_the_bytes_that_are_reckoned_with() -> None:
    tensors, shards = 40, 64
    properties = listed.TensorProperties(dtype=torch.float32)
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for tensor in range(tensors):
        name = f"model.layers.{tensor}.mlp.gate_proj.weight"
        offsets = [torch.Size([10 * shard, 0]) for shard in range(shards)]
        chunks = [listed.ChunkStorageMetadata(one, torch.Size([10, 4096])) for one in offsets]
        size = torch.Size([10 * shards, 4096])
        state[name] = listed.TensorStorageMetadata(properties, size, chunks)
        for shard, offset in enumerate(offsets):
            index = listed.MetadataIndex(name, offset, shard)
            storage[index] = _StorageInfo(f"__{shard}_0.distcp", 163_840 * tensor, 163_840)
    written = pickle.dumps(listed.Metadata(state, None, storage))
    assert len(written) / tensors / shards == pytest.approx(facts.ENTRY.value, rel=0.15)


def test_the_first_rank_opens_each_file_as_often_as_computed(tmp_path: Path) -> None:
    files = 20
    for number in range(files):
        with PackedWriter(tmp_path / f"{number:02}.npy") as file:
            file.write(np.arange(100))
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and str(tmp_path) in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    Packed(f"{tmp_path}/*.npy", 10)
    watching = False
    assert len(opened) == files * facts.OPENS.value


def test_windows_that_are_read() -> None:
    """One sample reads a window; many read the set, and not more."""
    total, ahead, sample = 1 << 26, 1 << 20, 4096
    assert reading.windows_read(total, ahead, 1) == pytest.approx(ahead)
    assert reading.windows_read(total, ahead, 10_000) == pytest.approx(total)
    for samples in (10, 60, 200):
        drawn = [
            reading.simulate(total, ahead, sample, samples, np.random.default_rng(seed))
            for seed in range(20)
        ]
        assert np.mean(drawn) == pytest.approx(
            reading.windows_read(total, ahead, samples), rel=0.05
        )


def test_files_that_are_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples in random order, with fewer files kept open than there are."""
    files, kept = 20, 5
    for number in range(files):
        with PackedWriter(tmp_path / f"{number:02}.npy") as file:
            file.write(np.arange(11 * 50))
    monkeypatch.setattr(opened_files, "OPEN", kept)
    samples = Packed(f"{tmp_path}/*.npy", 10)
    for one in range(0, len(samples), 50):  # as many as are kept are open
        samples[one]
    opened = 0
    original = samples._maps._map

    def counting(path: str, size: int) -> mmap.mmap:
        nonlocal opened
        opened += 1
        return original(path, size)

    monkeypatch.setattr(samples._maps, "_map", counting)
    drawn = np.random.default_rng(1).integers(0, len(samples), 4000)  # (samples,)
    for one in drawn.tolist():
        samples[one]
    assert opened == pytest.approx(reading.opened_anew(4000, files, kept), rel=0.03)
    assert reading.opened_anew(4000, 3, kept) == 0
