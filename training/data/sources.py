"""The sources of data by their names, opened and checked before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from training.config.config import Config
from training.config.sections import STREAM
from training.data.arrow import Arrow
from training.data.base import Samples
from training.data.feed import Feed
from training.data.lines import Lines
from training.data.loader import Ahead
from training.data.mixture import Mixture, Source
from training.data.packed import LAYOUTS, Layout, Packed
from training.data.sampler import Reader
from training.data.stream import open_stream
from training.data.synthetic import Synthetic
from training.data.text import Text
from training.errors import RequestError

_LAYOUTS: Mapping[str, Layout] = {"packed": LAYOUTS["16/14"], "packed-17/13": LAYOUTS["17/13"]}
_ENTRY = {"path", "weight", "order"}


def open_data(config: Config, rank: int, world_size: int, device: torch.device) -> Ahead:
    """Open the data of a run, checked against the model before the first step, to be read ahead.

    Raises RequestError for a source that is not known, missing, too short, or with token ids
    beyond the model's vocabulary.
    """
    reopen = partial(open_feed, config, rank, world_size)
    return Ahead(
        reopen(),
        partial(reopen, checked=True),
        workers=config.data.num_workers,
        prefetch=config.data.prefetch,
        device=device,
    )


def open_feed(config: Config, rank: int, world_size: int, *, checked: bool = False) -> Feed:
    """Open what one rank trains on; what is `checked` already is taken as it is."""
    data, setting = config.data, "dataset_path"
    if data.dataset_path.startswith(STREAM):
        if data.n_samples_to_skip or data.position_weighting:
            name = "n_samples_to_skip" if data.n_samples_to_skip else "position_weighting"
            raise RequestError(f"{name}: a stream has none; tokenize it to a set on disk or packed")
        feed: Feed = open_stream(config, setting, rank, world_size, checked=checked)
    else:
        samples = open_samples(
            data.dataset_path,
            data.seq_length,
            setting,
            config.model.sizes.vocab_size,
            config.run.seed,
            position_weighting=data.position_weighting,
            split=data.dataset_split,
        )
        feed = Reader(
            samples,
            batch_size=data.batch_size,
            seed=config.run.seed,
            rank=rank,
            world_size=world_size,
            accumulation=data.gradient_accumulation,
            # A mixture has an order of its own.
            shuffle=not isinstance(samples, Mixture),
            skip=data.n_samples_to_skip,
            epochs=data.epochs,
            setting=setting,
        )
    if not checked:
        _require_vocabulary(feed, config, setting)
    return feed


def open_evaluation(config: Config, rank: int, world_size: int) -> Feed | None:
    """Open the held-out data, to be read in order, once; None where there is none."""
    data, setting = config.data, "eval_dataset_path"
    if not data.eval_dataset_path:
        return None
    if data.eval_dataset_path.startswith(STREAM):
        feed: Feed = open_stream(config, setting, rank, world_size)
    else:
        samples = open_samples(
            data.eval_dataset_path,
            data.seq_length,
            setting,
            config.model.sizes.vocab_size,
            config.run.seed,
            split=data.eval_split,
        )
        feed = Reader(
            samples,
            batch_size=data.eval_batch_size or data.batch_size,
            seed=config.run.seed,
            rank=rank,
            world_size=world_size,
            shuffle=False,
            epochs=1,
            setting=setting,
        )
    _require_vocabulary(feed, config, setting)
    return feed


def _require_vocabulary(feed: Feed, config: Config, setting: str) -> None:
    if config.model.sizes.vocab_size < feed.vocab_size:
        raise RequestError(
            f"{setting}: has token ids up to {feed.vocab_size - 1:,}, and the vocabulary of "
            f"{config.model.name} has {config.model.sizes.vocab_size:,}"
        )


def open_samples(
    path: str,
    seq_length: int,
    setting: str,
    vocab_size: int,
    seed: int,
    *,
    position_weighting: bool = False,
    split: str = "train",
) -> Samples:
    """Open a source by its kind, for a model's vocabulary. Raises RequestError naming the setting.

    text:GLOB           files as bytes
    packed:GLOB         packed tokens, 16 bits of id and 14 of position; packed-17/13:GLOB
    lines:FOLDER        *.json and *.json.gz, an object a line with input_ids and attention_mask
    synthetic:          random tokens
    mixture:FILE        several of these, as a YAML list of {path, weight, order}
    a folder            a Hugging Face set on disk; `split` is its part, where it has parts
    """
    kind, separator, rest = path.partition(":")
    if position_weighting and kind not in (*_LAYOUTS, "mixture"):
        raise RequestError("position_weighting: only packed data has positions")
    try:
        if kind == "text" and separator:
            return Text(rest, seq_length)
        if kind in _LAYOUTS and rest:
            return Packed(
                rest,
                seq_length,
                layout=_LAYOUTS[kind],
                vocab_size=vocab_size,
                position_weighting=position_weighting,
            )
        if kind == "lines" and rest:
            return Lines(Path(rest), seq_length, seed=seed)
        if path == "synthetic:":
            return Synthetic(seq_length, vocab_size, seed=seed)
        if kind == "mixture" and rest:
            return _mixture(Path(rest), seq_length, vocab_size, seed, position_weighting)
        if Path(path).is_dir():
            return Arrow(path, seq_length, split)
    except RequestError as error:
        raise RequestError(f"{setting}: {error}") from error
    raise RequestError(
        f"{setting}: {path!r} is no source that is known; use text:GLOB, packed:GLOB, "
        "packed-17/13:GLOB, lines:FOLDER, synthetic:, mixture:FILE, stream:NAME or the folder "
        "of a Hugging Face set, such as 'text:/usr/lib/python3.11/**/*.py'"
    )


def _mixture(
    file: Path, seq_length: int, vocab_size: int, seed: int, position_weighting: bool
) -> Mixture:
    """Open the sources that a file lists. Raises RequestError naming the file and the entry."""
    import yaml

    try:
        entries = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"{file}: cannot be read: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise RequestError(f"{file}: must be a list of path, weight and order")
    sources = []
    for number, entry in enumerate(entries, 1):
        where = f"{file}: entry {number}"
        if not isinstance(entry, dict) or not {"path", "weight"} <= entry.keys() <= _ENTRY:
            raise RequestError(f"{where}: must have path and weight, and may have order")
        path, weight, order = str(entry["path"]), entry["weight"], entry.get("order", 0)
        if type(weight) not in (int, float) or type(order) is not int:
            raise RequestError(f"{where}: weight must be a number, and order a whole one")
        if path.startswith(STREAM):
            raise RequestError(f"{where}: path: a stream has no numbered samples, a mixture's have")
        weighted = position_weighting and _is_packed(path)
        samples = open_samples(
            path, seq_length, f"{where}: path", vocab_size, seed, position_weighting=weighted
        )
        sources.append(Source(name=path, samples=samples, weight=weight, order=order))
    if position_weighting and not any(_is_packed(source.name) for source in sources):
        raise RequestError(f"position_weighting: {file} lists no packed data, which has positions")
    return Mixture(sources, seed=seed)


def _is_packed(path: str) -> bool:
    return path.partition(":")[0] in _LAYOUTS
