"""Texts in .zst: all frames of a file are read, and a truncated file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from training.data.stream.shards import Shards
from training.data.tokenize.texts import open_texts
from training.errors import RequestError

datasets = pytest.importorskip("datasets")
zstandard = pytest.importorskip("zstandard")
Read = Callable[[Path], list[str]]
TEXTS = [f"text {number} {number * number}" for number in range(20_000)]
CONTENTS = {
    "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS),
    "csv": "text\n" + "".join(f"{text}\n" for text in TEXTS),
    "txt": "\n".join(TEXTS),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of datasets other than the user's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    yield


def packed(text: str) -> bytes:
    return bytes(zstandard.ZstdCompressor().compress(text.encode()))


def streamed(path: Path) -> list[str]:
    return list(Shards(str(path), "", "train", 0).read(0, 0))


def tokenized(path: Path) -> list[str]:
    texts = open_texts(str(path))
    return texts.read(0, len(texts))


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("read", [streamed, tokenized])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, kind: str, read: Read) -> None:
    whole = packed(CONTENTS[kind])
    path = tmp_path / f"a.{kind}.zst"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises((RequestError, EOFError), match="ended before the end-of-stream marker"):
        read(path)


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("read", [streamed, tokenized])
def test_all_frames_are_read(tmp_path: Path, kind: str, read: Read) -> None:
    text = CONTENTS[kind]
    path = tmp_path / f"a.{kind}.zst"
    path.write_bytes(packed(text[:100_000]) + packed(text[100_000:]))
    found = read(path)
    assert found == (["\n".join(TEXTS)] if kind == "txt" else TEXTS)
