"""Export of the trained model at the end of a run: the last checkpoint in Hugging Face's format.

One process writes it when the others have gone, so it needs no GPU and nobody waits for it. What a
run has written is noted in its own folder, as only that is replaced when the run is started again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from training.config.config import Config
from training.errors import RequestError, writing

NEW = ".new"
"""Suffix of what is being written, before it takes the place of what was there."""
NOTE = "final_model.json"
"""In a run's folder: final_model_dir -> the files that the run has written there."""


def check(config: Config) -> None:
    """Check before training that the model can be written at the end.

    What an earlier start of the run has written will be replaced. Raises RequestError for a folder
    that has anything else, that the run itself reads or writes, or that cannot be written, for a
    model that the format does not support, and if the library that writes it is missing.
    """
    if not config.run.final_model_dir:
        return
    from training.convert import hf

    try:
        import training.convert.target  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"final_model_dir: safetensors cannot be imported here ({error}); fix: pip install "
            "safetensors"
        ) from error
    folder = _folder(config)
    try:
        hf.write(config.model.sizes)
    except RequestError as error:
        raise RequestError(f"final_model_dir: {error}") from error
    _require_apart(folder, config)
    _require_own(folder, config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(prefix=f"{folder.name}{NEW}.", dir=folder.parent).cleanup()
    except OSError as error:
        raise RequestError(
            f"final_model_dir: {folder} cannot be written: {error.strerror}; fix: give a folder "
            "that can"
        ) from error


def write(config: Config, say: Callable[[str], None]) -> None:
    """Write the newest checkpoint's model, whole or not at all. Raises TrainingError."""
    if not config.run.final_model_dir:
        return
    from training.convert.source import Source
    from training.convert.target import clear_leftovers, write_model

    folder = _folder(config)
    new = folder.with_name(folder.name + NEW)
    _require_own(folder, config)  # it may have gained files since the start
    source = Source.open("ours", Path(config.run.save_ckpt_path))
    with writing(folder):
        if new.exists():  # of a start that was killed
            shutil.rmtree(new)
        clear_leftovers(new)
    done = write_model(source, "hf", new, None, None)
    with writing(folder):
        # Note both: a start that is killed here leaves one or the other, or a part of it.
        _note(config, folder, [*_stamps(folder), *_stamps(new)])
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    say(f"wrote {folder}: the model of {source.folder.name}, {done.size:,} bytes")


def _folder(config: Config) -> Path:
    return Path(config.run.final_model_dir).resolve()


def _require_apart(folder: Path, config: Config) -> None:
    """Refuse to replace a folder that the run itself reads or writes."""
    weights, save = config.model.init_weights, config.run.save_ckpt_path
    for setting, path in (("init_weights", weights), ("save_ckpt_path", save)):
        other = Path(path).resolve()
        is_inside = setting == "init_weights" and folder.is_relative_to(other)
        if path and (is_inside or other.is_relative_to(folder)):
            raise RequestError(
                f"final_model_dir: {folder} and {setting} ({path}) overlap, and what is in "
                "final_model_dir is replaced; fix: give a folder of its own"
            )


def _require_own(folder: Path, config: Config) -> None:
    """Refuse to replace files that the run has not written, or that were changed since."""
    noted = _notes(config).get(str(folder), [])
    for place in (folder, folder.with_name(folder.name + NEW)):
        try:
            others = [name for name, *stamp in _stamps(place) if [name, *stamp] not in noted]
        except OSError as error:
            raise RequestError(f"final_model_dir: {place}: {error.strerror}") from error
        if others:
            raise RequestError(
                f"final_model_dir: {place} has {min(others)}, which this run has not written, and "
                "would be replaced; fix: give another folder, or move it away"
            )


def _stamps(folder: Path) -> list[list[Any]]:
    """List name, size and time of a folder's files, by which other and changed ones are known."""
    if not folder.exists():
        return []
    files = [(path.name, path.lstat()) for path in folder.iterdir()]
    return [[name, found.st_size, found.st_mtime_ns] for name, found in files]


def _notes(config: Config) -> dict[str, list[list[Any]]]:
    """Read which files the run has written where; empty if that is not known."""
    with suppress(OSError, ValueError, AttributeError):
        return dict(json.loads((Path(config.run.save_ckpt_path) / NOTE).read_text()).items())
    return {}


def _note(config: Config, folder: Path, stamps: list[list[Any]]) -> None:
    path = Path(config.run.save_ckpt_path) / NOTE
    half = path.with_name(f"{NOTE}{NEW}")
    with writing(path):
        half.write_text(json.dumps(_notes(config) | {str(folder): stamps}) + "\n")
        half.replace(path)
