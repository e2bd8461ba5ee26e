"""Texts, a tokenizer, and the command that makes data sets of them, for the tokenizing tests."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT
from training.data.tokenize.__main__ import tokenize

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
END = "<|endoftext|>"
SOURCE = sorted(Path(os.__file__).parent.glob("*.py"))
"""Real text of many kinds: the standard library's sources."""


@pytest.fixture(name="place", scope="module")
def place_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tokenizer, and a cache of datasets that is not the user's."""
    folder = tmp_path_factory.mktemp("tokenize")
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    patch.setenv("HF_HOME", str(folder / "hub"))
    patch.setenv("HF_DATASETS_OFFLINE", "1")
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("TOKENIZERS_PARALLELISM", "false")
    make_tokenizer(folder / "bpe")
    yield folder
    patch.undo()


def make_tokenizer(folder: Path) -> None:
    folder.mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<s>", END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(path) for path in SOURCE[:10]], trainer)
    made.enable_truncation(16)  # as in some tokenizer files; texts must not be cut
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": {"content": END}, "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def make(place: Path, data: object, target: Path, *flags: str) -> Path:
    base = (f"--dataset={data}", f"--tokenizer={place}/bpe", f"--save_path={target}")
    tokenize([*base, "--num_proc=1", *flags])
    return target


def write_txt(folder: Path, texts: list[str]) -> object:
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def write_jsonl(folder: Path, texts: list[str]) -> object:
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("\n".join(lines[:5]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[5:]))
    return folder


def write_parquet(folder: Path, texts: list[str]) -> object:
    datasets.Dataset.from_dict({"text": texts}).to_parquet(str(folder / "a.parquet"))
    return f"{folder}/*.parquet"


def write_set(folder: Path, texts: list[str]) -> object:
    datasets.Dataset.from_dict({"text": [text or None for text in texts]}).save_to_disk(str(folder))
    return folder


def command(place: Path, *flags: str) -> list[str]:
    # No bytecode: a limit on file sizes would truncate it too, and later imports would fail.
    program = [sys.executable, "-B", "-m", "training.data.tokenize"]
    return [*program, f"--tokenizer={place}/bpe", *flags]


def remove_as_nfs_does(patch: pytest.MonkeyPatch) -> None:
    """Keep a removed but open file under another name, as an NFS client does."""
    unlink, rename = os.unlink, os.rename

    def removed(path: str | Path, *, dir_fd: int | None = None) -> None:
        folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        place = folder.absolute() / path
        opened = {os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
        if str(place) in opened:
            rename(place, place.with_name(".nfs0000000000000001"))
        else:
            unlink(place)

    patch.setattr(os, "unlink", removed)


def run(place: Path, *flags: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        command(place, *flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=limited,
    )
