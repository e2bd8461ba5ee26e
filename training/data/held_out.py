"""Refuse held-out data that is trained on, by comparing the files of both, of whatever kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.config.config import Config
from training.config.sections import STREAM
from training.data.arrow import split_folder
from training.data.base import Samples
from training.data.lines import find_lines
from training.data.mixture import listed
from training.data.packed import find_packed
from training.data.splits import matching
from training.data.stream.shards import Shards, find_local
from training.errors import RequestError


def require_held_out(config: Config, held_out: Samples | Shards) -> None:
    """Refuse to evaluate on anything that is trained on. Raises RequestError."""
    data = config.data
    if isinstance(held_out, Shards):
        files = list(held_out.files)
        _require_other_split(config, held_out)
    else:
        files = list(_files(config, data.eval_dataset_path, data.eval_split))
    trained = {Path(one).resolve() for one in _files(config, data.dataset_path, data.dataset_split)}
    for file in sorted(files):
        if Path(file).resolve() in trained:
            raise _refusal(file)


def _files(config: Config, path: str, split: str) -> Iterator[str]:
    """Find the files that a source reads; for a set on disk, the folder that holds them."""
    kind, _, rest = path.partition(":")
    if path.startswith(STREAM):
        local = find_local(path.removeprefix(STREAM), config.data.dataset_config)
        yield from local.splits.get(split, ()) if local else ()
    elif kind == "mixture":
        for entry in listed(Path(rest)):
            if entry.weight > 0:
                yield from _files(config, entry.path, split)
    elif kind == "text":
        yield from matching(rest)
    elif kind in ("packed", "packed-17/13"):
        yield from find_packed([rest])
    elif kind == "lines":
        yield from map(str, find_lines(Path(rest))[0])
    elif Path(path).is_dir():
        yield str(split_folder(path, split))


def _require_other_split(config: Config, held_out: Shards) -> None:
    """Refuse a hub split that is trained on, by its name: its files are not known here."""
    name, split = config.data.dataset_path.removeprefix(STREAM), config.data.dataset_split
    is_stream = config.data.dataset_path.startswith(STREAM)
    if is_stream and not held_out.local and (name, split) == (held_out.name, held_out.split):
        raise _refusal(f"split {split!r} of {name}")


def _refusal(what: str) -> RequestError:
    return RequestError(
        f"eval_dataset_path: {what} is trained on; fix: hold out other files, or another split"
    )
