"""What is trained on: every rank gets its own part, and the place goes in checkpoints."""

from __future__ import annotations

from training.config import Config
from training.data.text import PREFIX, VOCABULARY, TextData
from training.errors import RequestError


def open_data(config: Config, rank: int, world_size: int) -> TextData:
    """Open the data of a run, checked against the model before the first step.

    Raises RequestError for a source that is not known, missing, too short, or with token ids
    beyond the model's vocabulary.
    """
    path = config.data.dataset_path
    if not path.startswith(PREFIX):
        raise RequestError(
            f"dataset_path: {path!r} is no source that is known; use text:GLOB, "
            "such as 'text:/usr/lib/python3.11/**/*.py'"
        )
    if config.model.sizes.vocab_size < VOCABULARY:
        raise RequestError(
            f"dataset_path: bytes need a vocabulary of {VOCABULARY}, and {config.model.name} has "
            f"{config.model.sizes.vocab_size}"
        )
    return TextData(
        path,
        seq_length=config.data.seq_length,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        rank=rank,
        world_size=world_size,
    )
