"""Fetch a model of the Hugging Face hub: `python -m training.checkpoint.hub NAME FOLDER`.

A run does so by itself, with --init_hub; this is for a machine that has the network, where the
nodes of the run have none. What the folder has already is not fetched again; a run starts from it
with --init_weights=FOLDER. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count, as the library
huggingface_hub documents them.
Exit codes: 0 done, 2 the model cannot be had.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.cli import Parser, run_command
from training.errors import RequestError

if TYPE_CHECKING:  # it takes torch
    from training.process_group import Group

CONFIG = "config.json"
SETTING = "init_hub"
"""What a run calls the model."""
_SMALL = (CONFIG, "generation_config.json", "*.index.json", "tokenizer*", "*tokens*.json")
_WEIGHTS = (("*.safetensors",), ("pytorch_model*.bin",))
"""Files of weights: those that are taken, and those where there are none of them."""


def config_file(name: str, folder: str) -> Path:
    """Find a model's config.json: in a folder that has it already, else in the hub.

    Raises RequestError where it cannot be had.
    """
    there = Path(folder) / CONFIG
    if folder and there.is_file():
        return there
    return Path(_ask(name, lambda library: library.hf_hub_download(name, CONFIG)))


def fetch(name: str, folder: str, group: Group, say: Callable[[str], None]) -> Path:
    """Bring a model's files to a folder, or where the library keeps them; the folder.

    A collective call. Rank 0 comes first, then the first rank of every other node, which finds
    everything there if the nodes share the folder. Raises RequestError where it cannot be had.
    """
    if folder and group.broadcast(_is_complete(Path(folder))):
        return Path(folder)
    say(f"fetching {name} of the hub" + (f" to {folder}" if folder else ""))
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    where = ""
    for its_turn in (group.rank == 0, first, not first):
        if its_turn and not where:
            where = group.together(lambda: _download(name, folder))
        else:
            group.together(lambda: None)
    return Path(where)


def _download(name: str, folder: str) -> str:
    """Fetch what is not there yet."""
    place: dict[str, Any] = {"local_dir": folder} if folder else {}
    for weights in _WEIGHTS:

        def snapshot(library: Any, weights: tuple[str, ...] = weights) -> str:
            found: str = library.snapshot_download(
                name, allow_patterns=[*_SMALL, *weights], **place
            )
            return found

        where = _ask(name, snapshot)
        if _is_complete(Path(where)):
            return where
    raise RequestError(f"{SETTING}: {name} has no weights: neither safetensors nor pytorch_model")


def _is_complete(folder: Path) -> bool:
    """Tell whether a folder has a model, sizes and weights."""
    return (folder / CONFIG).is_file() and any(
        True for (pattern,) in _WEIGHTS for _ in folder.glob(pattern)
    )


def _ask(name: str, question: Callable[[Any], str]) -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise RequestError(
            f"{SETTING}: {name} is no folder here; a model of the hub takes the library "
            "huggingface_hub (pip install huggingface_hub)"
        ) from error
    try:
        return question(huggingface_hub)
    except Exception as error:  # the library, and what it goes by, have many errors of their own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RequestError(
            f"{SETTING}: {name} cannot be had from the hub: {reason}; give a local folder of the "
            "model instead"
        ) from error


def main(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError where the model cannot be had."""
    parser = Parser("python -m training.checkpoint.hub", str(__doc__))
    parser.add_argument("name", metavar="NAME", help="the model's name in the hub, owner/model")
    parser.add_argument("folder", metavar="FOLDER", help="folder for its files")
    given = parser.parse_args(list(arguments))
    if not _is_complete(Path(given.folder)):
        try:
            _download(given.name, given.folder)
        except RequestError as error:  # which names the setting of a run
            raise RequestError(str(error).removeprefix(f"{SETTING}: ")) from error
    print(f"{given.folder} has {given.name}\nto start from it: --init_weights={given.folder}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
