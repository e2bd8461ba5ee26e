"""What is trained on: every rank gets its own part, and the place goes in checkpoints."""

from __future__ import annotations

from training.config import Config
from training.data.reader import Reader
from training.data.samples import Samples
from training.data.text import PREFIX, Text
from training.errors import RequestError


def open_data(config: Config, rank: int, world_size: int) -> Reader:
    """Open the data of a run, checked against the model before the first step.

    Raises RequestError for a source that is not known, missing, too short, or with token ids
    beyond the model's vocabulary.
    """
    return _reader(config, "dataset_path", rank, world_size, shuffle=True)


def open_evaluation(config: Config, rank: int, world_size: int) -> Reader | None:
    """Open the held-out data in the same way, to be read in order; None where there is none."""
    if not config.data.eval_dataset_path:
        return None
    return _reader(config, "eval_dataset_path", rank, world_size, shuffle=False)


def _reader(config: Config, setting: str, rank: int, world_size: int, *, shuffle: bool) -> Reader:
    samples = open_samples(getattr(config.data, setting), config.data.seq_length, setting)
    if config.model.sizes.vocab_size < samples.vocab_size:
        raise RequestError(
            f"{setting}: has token ids up to {samples.vocab_size - 1:,}, and the vocabulary of "
            f"{config.model.name} has {config.model.sizes.vocab_size:,}"
        )
    return Reader(
        samples,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        setting=setting,
    )


def open_samples(path: str, seq_length: int, setting: str) -> Samples:
    """Open a source by its kind. Raises RequestError naming the setting that it is of."""
    if path.startswith(PREFIX):
        return Text(path.removeprefix(PREFIX), seq_length, setting)
    raise RequestError(
        f"{setting}: {path!r} is no source that is known; use text:GLOB, "
        "such as 'text:/usr/lib/python3.11/**/*.py'"
    )
