"""What is trained and validated on, by the flags of SMP v2."""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

from training.data.remote import is_url

LINES = "lines:"
SYNTHETIC = "synthetic:"


def settings(given: Mapping[str, Any], notes: list[str], faults: list[str]) -> dict[str, Any]:
    """Give the settings of ours that the flags mean.

    To `notes` is added what the user should be told, to `faults` what is wrong.
    """
    test = given["test_dir"]
    if given["zipped_data"] is not None and not _is_lines(given):
        faults.append("--zipped_data: only dataset_type=gpt_jsonl heeds it; leave it out")
    if given["use_synthetic_data"]:
        if given["validation_freq"] or test:
            notes.append("use_synthetic_data: random tokens, so there is no validation")
        if given["training_dir"]:
            notes.append("use_synthetic_data: random tokens, so training_dir is not read")
        return {"dataset_path": SYNTHETIC, "eval_dataset_path": "", "eval_interval": 0}
    if test is None:
        test = os.environ.get("SM_CHANNEL_TEST", "") if given["validation_freq"] else ""
    train = given["training_dir"]
    if not train:
        faults.append(
            "--training_dir: must be given (or SM_CHANNEL_TRAIN), or use_synthetic_data=1"
        )
        return {}
    if given["validation_freq"] and not test:
        faults.append("--test_dir: must be given (or SM_CHANNEL_TEST) with validation_freq")
    if test and _files(train, given) & _files(test, given):
        faults.append(
            f"--test_dir: {test} has files of training_dir, which training sees; give others"
        )
    return {
        "dataset_path": _source(train, given),
        "eval_dataset_path": _source(test, given) if test else "",
    }


def _is_lines(given: Mapping[str, Any]) -> bool:
    return given["dataset_type"] == "gpt_jsonl" and not given["use_synthetic_data"]


def _source(folder: str, given: Mapping[str, Any]) -> str:
    """Name the source that a folder is; what has a kind already is meant as it stands."""
    if _has_kind(folder) or given["dataset_type"] == "hf":
        return folder
    return LINES + _pattern(folder, given)


def _pattern(folder: str, given: Mapping[str, Any]) -> str:
    """Name the files of a folder or URL that are read; one that is a pattern stands as it is."""
    folder = folder.rstrip("/")
    ending = "*.json" if given["zipped_data"] is False else "*.json.gz"
    return folder if has_magic(folder.rpartition("/")[2]) else f"{folder}/{ending}"


def _files(folder: str, given: Mapping[str, Any]) -> set[Path]:
    """Find what a folder would read: its files of JSON lines, or itself for a set on disk."""
    if _has_kind(folder) or is_url(folder):
        return {Path(folder)}
    if given["dataset_type"] == "hf":
        path = Path(folder)
        has_parts = (path / "dataset_dict.json").is_file()  # training and validation are two
        return set() if has_parts else {path.resolve()}
    pattern = Path(_pattern(folder, given))
    return {path.resolve() for path in pattern.parent.glob(pattern.name)} | {pattern}


def _has_kind(folder: str) -> bool:
    kind, separator, _ = folder.partition(":")
    return bool(separator) and "/" not in kind and not is_url(folder)
