"""Our settings that the flags of SMP v2 mean: its data, and how the model is spread.

No torch needed here: whether SMP v2's library, torch.sagemaker, is installed is found out without
loading torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from training.config.sections import STREAM
from training.data.remote import is_url
from training.systems.smp.flags import PREFETCH, SHARDING
from training.systems.smp.model import SHARD_DEGREES

LINES = "lines:"
SYNTHETIC = "synthetic:"
PLAIN, ZIPPED = "*.json", "*.json.gz"

HYBRID = "hybrid_shard"


def has_smp_library() -> bool:
    """Return whether torch includes the library."""
    torch = find_spec("torch")
    places = torch.submodule_search_locations if torch else None
    return any((Path(place) / "sagemaker").is_dir() for place in places or ())


def data_settings(given: Mapping[str, Any], notes: list[str], faults: list[str]) -> dict[str, Any]:
    """Return our data settings that the flags mean.

    What the user should know is added to `notes`, and what is wrong to `faults`.
    """
    test = given["test_dir"]
    if given["use_synthetic_data"]:
        if given["zipped_data"] is not None:
            faults.append("--zipped_data: random tokens have no files; fix: leave it out")
        if given["validation_freq"] or test:
            notes.append("use_synthetic_data: random tokens, so there is no validation")
        if given["training_dir"]:
            notes.append(
                "WARNING: use_synthetic_data: trains on random tokens, and "
                f"{given['training_dir']} is not read; fix: leave use_synthetic_data out to train "
                "on it"
            )
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
    if given["zipped_data"] is not None:
        faults += _zipped_faults(train, test, given)
    elif given["dataset_type"] == "gpt_jsonl" and _ending(train, given) == PLAIN:
        notes.append(f"zipped_data: 0, as {train} has {PLAIN} files and no {ZIPPED}")
    if test and _files(train, given) & _files(test, given):
        faults.append(
            f"--test_dir: {test} has files of training_dir, which training sees; fix: give others"
        )
    return {
        "dataset_path": _source(train, given),
        "eval_dataset_path": _source(test, given) if test else "",
    }


def _zipped_faults(train: str, test: str, given: Mapping[str, Any]) -> list[str]:
    """List why zipped_data would have no effect."""
    if given["dataset_type"] != "gpt_jsonl":
        return ["--zipped_data: only dataset_type=gpt_jsonl uses it; fix: leave it out"]
    if any(one and not _has_kind(one) and not _is_pattern(one) for one in (train, test)):
        return []
    return [f"--zipped_data: {train} is not a folder whose files it chooses; fix: leave it out"]


def _source(folder: str, given: Mapping[str, Any]) -> str:
    """Return the source that a folder is; one that has a kind is meant as it is."""
    if _has_kind(folder) or given["dataset_type"] == "hf":
        return folder
    return LINES + _pattern(folder, given)


def _pattern(folder: str, given: Mapping[str, Any]) -> str:
    """Return the pattern of the files to read in a folder or URL; a pattern stays as it is."""
    folder = folder.rstrip("/")
    return folder if _is_pattern(folder) else f"{folder}/{_ending(folder, given)}"


def _is_pattern(folder: str) -> bool:
    return has_magic(folder.rstrip("/").rpartition("/")[2])


def _ending(folder: str, given: Mapping[str, Any]) -> str:
    """Return which files of a folder to read: those that the flag names, else those that exist.

    If both kinds exist, only those that the system reads by default: they may be the same data.
    """
    zipped, path = given["zipped_data"], Path(folder)
    if zipped is None and not is_url(folder):
        zipped = any(path.glob(ZIPPED)) or not any(path.glob(PLAIN))
    return PLAIN if zipped is False else ZIPPED


def _files(folder: str, given: Mapping[str, Any]) -> set[Path]:
    """Find what a folder would read: its files of JSON lines, or itself for a set on disk."""
    if folder.startswith(STREAM):  # which has parts
        return set()
    if _has_kind(folder) or is_url(folder):
        return {Path(folder)}
    if given["dataset_type"] == "hf":
        path = Path(folder)
        has_parts = (path / "dataset_dict.json").is_file()  # training and validation are separate
        return set() if has_parts else {path.resolve()}
    pattern = Path(_pattern(folder, given))
    return {path.resolve() for path in pattern.parent.glob(pattern.name)} | {pattern}


def _has_kind(folder: str) -> bool:
    kind, separator, _ = folder.partition(":")
    return bool(separator) and "/" not in kind and not is_url(folder)


def sharding_settings(
    given: Mapping[str, Any], notes: list[str], faults: list[str]
) -> dict[str, Any]:
    """Return our sharding settings that the flags mean.

    With a shard_degree the sharding is hybrid, in groups of so many data-parallel ranks, each of
    which is a tensor group. The default degree of a model_size applies only if the sharding is
    hybrid already. What the user should know is added to `notes`, and what is wrong to `faults`.
    """
    strategy, degree = given["sharding_strategy"], given["shard_degree"]
    is_hybrid = SHARDING[strategy]["sharding_strategy"] == "hsdp"
    if degree is None:
        degree = SHARD_DEGREES.get(given["model_size"], 0) if is_hybrid else 0
        if degree:
            notes.append(f"shard_degree: {degree}, that of model_size {given['model_size']}")
    if degree < 0:
        faults.append(f"--shard_degree: must be from 0 to the number of ranks, not {degree}")
    if degree > 0 and not is_hybrid:
        notes.append(f"sharding_strategy: {HYBRID}, not {strategy}, as shard_degree is {degree}")
        strategy = HYBRID
    found = {**SHARDING[strategy], "backward_prefetch": PREFETCH[given["backward_fetch_policy"]]}
    if degree > 0:
        found["shard_group_size"] = degree * given["tensor_parallel_degree"]
    return found
