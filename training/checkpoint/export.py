"""The trained model at the end of a run: a folder in Hugging Face's format, of the last checkpoint.

One process writes it, when the others have gone, so it takes no GPU and nobody waits for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from training.config.config import Config
from training.errors import RequestError, writing

NEW = ".new"
"""Ends the name of what is written before it takes the place of what was there."""


def check(config: Config) -> None:
    """Find out before training whether the model can be written at the end.

    A folder that has a model of the same sizes, as an earlier start of the run leaves it, will be
    replaced. Raises RequestError for one that has anything else, for a model that the format does
    not have, and where the library that writes it is missing.
    """
    if not config.run.final_model_dir:
        return
    from training.convert import hf
    from training.convert.config import read_json

    try:
        import training.convert.target  # noqa: F401
    except ImportError as error:
        raise RequestError(f"final_model_dir: pip install safetensors ({error})") from error
    folder = Path(config.run.final_model_dir)
    try:
        settings = hf.write(config.model.sizes)
        if not folder.exists() or _is_empty(folder):
            folder.absolute().parent.mkdir(parents=True, exist_ok=True)
            return
        file = folder / "config.json"
        is_same = hf.read(read_json(file), file) == hf.read(settings, file)
    except OSError as error:
        raise RequestError(f"final_model_dir: {folder}: {error.strerror}") from error
    except (RequestError, KeyError) as error:
        raise RequestError(f"final_model_dir: {folder} is no model's folder: {error}") from error
    if not is_same:
        raise RequestError(f"final_model_dir: {folder} has another model; give another folder")


def write(config: Config, say: Callable[[str], None]) -> None:
    """Write the newest checkpoint's model, complete or not at all. Raises TrainingError."""
    if not config.run.final_model_dir:
        return
    from training.convert.source import Source
    from training.convert.target import write_model

    folder = Path(config.run.final_model_dir).absolute()
    new = folder.with_name(folder.name + NEW)
    source = Source.open("ours", Path(config.run.save_ckpt_path))
    with writing(folder):
        if new.exists():  # of a start that was killed
            shutil.rmtree(new)
    done = write_model(source, "hf", new, None, None)
    with writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    say(f"wrote {folder}: the model of {source.folder.name}, {done.size:,} bytes")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None
