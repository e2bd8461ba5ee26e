"""Advice for users who give texts where tokens are expected, or tokens where texts are."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import zlib
from glob import has_magic
from pathlib import Path
from typing import Any

from training.data.splits import kind_of, text_files

TOKENIZER = "EleutherAI/gpt-neox-20b"
"""The default tokenizer of training.data.tokenize."""
FIRST_LINE = 2**24
"""The most bytes that are read of a file's first line."""


def how_to_read(path: str, seq_length: int = 0) -> str:
    """Say how to train on texts that are given as if they were tokenized; empty if there are none.

    seq_length: that of the run, 0 for the default. The first line of a JSON file shows whether it
    has texts or tokens.
    """
    place = Path(path)
    files = [path] if os.path.isfile(path) and kind_of(path) else text_files(place)  # noqa: PTH113
    first = next(iter(files), "")
    if not first:
        return ""
    if lines := lines_of_tokens(first):
        return f"{path} has lines of tokens; fix: write {lines}"
    fix = how_to_read_texts(path, seq_length)
    return f"{path} has texts, as {first}, and no tokens; fix: {fix}"


def lines_of_tokens(file: str, given: str = "") -> str:
    """Name the source that reads a file's lines of tokens; empty if it has no such lines.

    given: the name or pattern that found the file; a pattern of names in one folder is kept.
    """
    path = Path(file)
    if not _keys(path) >= {"input_ids", "attention_mask"}:
        return ""
    folder, name = os.path.split(given)
    if has_magic(name) and not has_magic(folder):
        return f"lines:{given}"
    return f"lines:{path.parent}/*{''.join(path.suffixes[-2 if path.suffix == '.gz' else -1 :])}"


def is_tokenized(folder: Path) -> bool:
    """Return whether a folder is a set on disk that states that it has tokens."""
    parts = [folder] if (folder / "state.json").is_file() else []
    if (folder / "dataset_dict.json").is_file():
        parts = [path.parent for path in folder.glob("*/dataset_info.json")]
    try:
        listed = [json.loads((one / "dataset_info.json").read_text()) for one in parts]
        return any("input_ids" in one["features"] for one in listed)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def how_to_read_texts(path: str, seq_length: int = 0) -> str:
    """Say what to write to train on texts: the source, or the command that tokenizes them."""
    place = Path(path).absolute()
    name = place.name.partition(".")[0] or place.name
    made = shlex.quote(str(place.with_name(f"{name}_tokenized")))
    length = f" --seq_len={seq_length}" if seq_length else ""
    return (
        f"write stream:{path} and name a tokenizer, which reads them as they are, or tokenize them "
        f"first: python3 -m training.data.tokenize --dataset={shlex.quote(path)} "
        f"--tokenizer={TOKENIZER}{length} --save_path={made} (and train on {made})"
    )


def _keys(path: Path) -> set[str]:
    """Read the keys in a file's first line of JSON; none if it has no such line."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            return set(json.loads(file.readline(FIRST_LINE)))
    except (OSError, EOFError, ValueError, TypeError, zlib.error):
        return set()
