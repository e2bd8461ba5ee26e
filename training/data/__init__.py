"""What is trained on: every rank gets its own part, and the place goes in checkpoints."""

from __future__ import annotations

from pathlib import Path

from training.config import Config
from training.data.arrow import Arrow
from training.data.lines import Lines
from training.data.mixture import Mixture, Source
from training.data.packed import LAYOUTS, Packed
from training.data.reader import Reader
from training.data.samples import Samples
from training.data.synthetic import Synthetic
from training.data.text import Text
from training.errors import RequestError

_LAYOUTS = {"packed": LAYOUTS["16/14"], "packed-17/13": LAYOUTS["17/13"]}
_ENTRY = {"path", "weight", "order"}


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
    samples = open_samples(
        getattr(config.data, setting),
        config.data.seq_length,
        setting,
        config.model.sizes.vocab_size,
        config.run.seed,
    )
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
        # A mixture has an order of its own.
        shuffle=shuffle and not isinstance(samples, Mixture),
        setting=setting,
    )


def open_samples(path: str, seq_length: int, setting: str, vocab_size: int, seed: int) -> Samples:
    """Open a source by its kind, for a model's vocabulary. Raises RequestError naming the setting.

    text:GLOB           files as bytes
    packed:GLOB         packed tokens, 16 bits of id and 14 of position; packed-17/13:GLOB
    lines:FOLDER        *.json and *.json.gz, an object a line with input_ids and attention_mask
    synthetic:          random tokens
    mixture:FILE        several of these, as a YAML list of {path, weight, order}
    a folder            a Hugging Face set on disk
    """
    kind, separator, rest = path.partition(":")
    try:
        if kind == "text" and separator:
            return Text(rest, seq_length)
        if kind in _LAYOUTS and rest:
            return Packed(rest, seq_length, layout=_LAYOUTS[kind], vocab_size=vocab_size)
        if kind == "lines" and rest:
            return Lines(Path(rest), seq_length, seed=seed)
        if path == "synthetic:":
            return Synthetic(seq_length, vocab_size, seed=seed)
        if kind == "mixture" and rest:
            return _mixture(Path(rest), seq_length, vocab_size, seed)
        if Path(path).is_dir():
            return Arrow(path, seq_length)
    except RequestError as error:
        raise RequestError(f"{setting}: {error}") from error
    raise RequestError(
        f"{setting}: {path!r} is no source that is known; use text:GLOB, packed:GLOB, "
        "packed-17/13:GLOB, lines:FOLDER, synthetic:, mixture:FILE or the folder "
        "of a Hugging Face set, such as 'text:/usr/lib/python3.11/**/*.py'"
    )


def _mixture(file: Path, seq_length: int, vocab_size: int, seed: int) -> Mixture:
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
        samples = open_samples(path, seq_length, f"{where}: path", vocab_size, seed)
        sources.append(Source(name=path, samples=samples, weight=weight, order=order))
    return Mixture(sources, seed=seed)
