"""Fetch a model from the Hugging Face hub: `python -m training.checkpoint.hub NAME FOLDER`.

With --init_hub a run does this itself; use this on a machine that has network access if the nodes
of the run have none. Files that the folder already has are not fetched again; a run starts from it
with --init_weights=FOLDER. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have the effect that
the library huggingface_hub documents.
Exit codes: 0 done, 2 the model cannot be fetched.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.cli import Parser, run_command
from training.errors import RequestError

if TYPE_CHECKING:  # it imports torch
    from training.process_group import Group

CONFIG = "config.json"
SETTING = "init_hub"
"""The setting of a run that names the model."""
_SMALL = (CONFIG, "generation_config.json", "*.index.json", "tokenizer*", "*tokens*.json")
_WEIGHTS = {"model.safetensors": "*.safetensors", "pytorch_model.bin": "pytorch_model*.bin"}
"""All weights in one file -> the files to fetch: torch's only if there are no others."""


def config_file(name: str, folder: str) -> Path:
    """Find a model's config.json: in a folder that already has it, else on the hub.

    Raises RequestError if it cannot be fetched.
    """
    there = Path(folder) / CONFIG
    if folder and there.is_file():
        return there
    return Path(_ask(name, lambda library: library.hf_hub_download(name, CONFIG)))


def fetch(name: str, folder: str, group: Group, say: Callable[[str], None]) -> Path:
    """Fetch a model's files to a folder, or to where the library keeps them; return the folder.

    A collective call. Rank 0 goes first, then the first rank of every other node, which finds
    everything there if the nodes share the folder. If the folder has all files, nothing is fetched.
    Raises RequestError if the model cannot be fetched.
    """
    if folder and not group.any(not _is_complete(Path(folder))):
        return Path(folder)
    say(f"fetching {name} from the hub" + (f" to {folder}" if folder else ""))
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    where = ""
    for its_turn in (group.rank == 0, first, not first):
        if its_turn and not where:
            where = group.together(lambda: _bring(name, folder), copies=True)
        else:
            group.together(lambda: None, copies=True)
    return Path(where)


def _bring(name: str, folder: str) -> str:
    """Fetch what is missing; return the folder that has all of it."""
    if folder and _is_complete(Path(folder)):
        return folder
    place: dict[str, Any] = {"local_dir": folder} if folder else {}
    for weights in _WEIGHTS.values():

        def snapshot(library: Any, weights: str = weights) -> str:
            found: str = library.snapshot_download(name, allow_patterns=[*_SMALL, weights], **place)
            return found

        where = _ask(name, snapshot)
        if _is_complete(Path(where)):
            return where
    raise RequestError(
        f"{SETTING}: {name} has no weights: neither {' nor '.join(_WEIGHTS)}, nor all files of an "
        "index of either; fix: give a local folder of the model instead"
    )


def _is_complete(folder: Path) -> bool:
    """Tell whether a folder has a model, sizes and all weights, as they are opened later.

    The library gives a file its name only once it has all of it.
    """
    if not (folder / CONFIG).is_file():
        return False
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return True
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _has_all(index)
    return False


def _has_all(index: Path) -> bool:
    """Tell whether all files that an index names are there."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return all((index.parent / name).is_file() for name in names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # the index is fetched again
        return False


def _ask(name: str, question: Callable[[Any], str]) -> str:
    if name.startswith(("/", "./", "../")):
        raise RequestError(
            f"{SETTING}: {name} is not a folder here; fix: give the folder of a model, or its name "
            "on the hub, owner/model"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise RequestError(
            f"{SETTING}: {name} is not a folder here, and a model on the hub needs the library "
            "huggingface_hub; fix: pip install huggingface_hub"
        ) from error
    try:
        return question(huggingface_hub)
    except Exception as error:  # the library and what it builds on have many errors of their own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(
            f"{SETTING}: {name} cannot be fetched from the hub: {reason}; fix: give a local folder "
            "of the model instead"
        ) from error


def main(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError if the model cannot be fetched."""
    parser = Parser("python -m training.checkpoint.hub", str(__doc__))
    parser.add_argument("name", metavar="NAME", help="the model's name on the hub, owner/model")
    parser.add_argument("folder", metavar="FOLDER", help="folder for its files")
    given = parser.parse_args(list(arguments))
    try:
        _bring(given.name, given.folder)
    except RequestError as error:  # which names the setting of a run
        raise RequestError(str(error).removeprefix(f"{SETTING}: ")) from error
    print(f"{given.folder} has {given.name}\nto start from it: --init_weights={given.folder}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
