"""Open sources of data by name, and check them before the first step."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from training.config.config import Config
from training.config.sections import STREAM
from training.data.arrow import Arrow
from training.data.base import DataFeed, Sample, Samples, begun
from training.data.held_out import require_held_out
from training.data.how_to_read import how_to_read
from training.data.lines import Lines
from training.data.loader import Prefetcher
from training.data.mixture import Mixture, listed
from training.data.mixture import Source as Part
from training.data.packed import LAYOUTS, Layout, Packed
from training.data.sampler import Reader
from training.data.splits import named
from training.data.stream.feed import open_shards, stream_of
from training.data.stream.shards import Shards
from training.errors import RequestError, TrainingError

BYTE_VOCABULARY = 256
LARGE_VOCABULARY = 1024
"""A model with at least this many ids is meant for a tokenizer's ids."""
_PACKED_KINDS: Mapping[str, Layout] = {"packed": LAYOUTS["16/14"], "packed-17/13": LAYOUTS["17/13"]}

Source = Samples | Shards
"""Opened data in a form that can be sent to every rank (training.data.shared)."""


class Synthetic:
    """Uniformly random tokens, to try out a model or a machine without data.

    Each sample is a pure function of the seed and its number.
    """

    def __init__(
        self, seq_length: int, vocab_size: int, *, seed: int = 0, count: int = 100_000
    ) -> None:
        for name, value in (("vocab_size", vocab_size), ("count", count)):
            if value < 1:
                raise RequestError(f"synthetic data: {name} is {value}, but must be at least 1")
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self.knows_documents = False
        self._seed, self._count = seed, count
        facts = f"synthetic {seq_length} {vocab_size} {seed} {count}"
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._count:
            raise IndexError(index)
        # Similar seeds would make generators start alike; digests are never similar.
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=8).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        row = torch.randint(self.vocab_size, (self.seq_length + 1,), generator=source)  # (l + 1,)
        return Sample.of_text(row)

    def described(self) -> str:
        return f"{self._count * (self.seq_length + 1):,} synthetic tokens"

    def is_here(self) -> bool:
        return True


class Text:
    """`text:GLOB`: plain files as bytes, with a vocabulary of 256, as samples.

    The files that match, in sorted order, form one long text in which each file is a document. It
    is cut into windows of seq_length + 1 bytes, each of which shares one byte with the next, so
    every byte except the first is predicted once.

    `notes` has a warning if the model's vocabulary is that of a tokenizer. Raises RequestError
    if nothing matches or a file cannot be read.
    """

    vocab_size = BYTE_VOCABULARY
    knows_documents = True

    def __init__(self, pattern: str, seq_length: int, model_vocabulary: int = 0) -> None:
        self.seq_length = seq_length
        self.notes: list[str] = []
        if model_vocabulary >= LARGE_VOCABULARY:
            self.notes = [
                f"WARNING: text:{pattern} is read as bytes, {BYTE_VOCABULARY} of the "
                f"{model_vocabulary:,} ids that the model has; for a tokenizer's ids use "
                "stream: with a tokenizer, or a set made by python -m training.data.tokenize"
            ]
        self._paths, sizes = _text_files(pattern)
        self._ends = list(accumulate(sizes))
        names = "\n".join(
            f"{Path(p).name} {size}" for p, size in zip(self._paths, sizes, strict=True)
        )
        self.fingerprint = hashlib.blake2b(
            f"text {seq_length}\n{names}".encode(), digest_size=16
        ).hexdigest()

    def __len__(self) -> int:
        return max(0, self._ends[-1] - 1) // self.seq_length

    def __getitem__(self, index: int) -> Sample:
        begin, length = index * self.seq_length, self.seq_length
        text = torch.frombuffer(
            bytearray(self._read(begin, length + 1)), dtype=torch.uint8
        )  # (l+1,)
        return replace(Sample.of_text(text), seq_idx=begun(self._ends, begin, length))

    def described(self) -> str:
        return f"{self._ends[-1]:,} bytes in {len(self._paths)} files"

    def is_here(self) -> bool:
        return Path(self._paths[0]).is_file()

    def _read(self, begin: int, length: int) -> bytes:
        pieces = []
        index = bisect_right(self._ends, begin)
        while length:
            end = self._ends[index]
            size = end - (self._ends[index - 1] if index else 0)
            take = min(length, end - begin)
            path = self._paths[index]
            try:
                with Path(path).open("rb") as file:
                    file.seek(size - (end - begin))
                    piece = file.read(take)
            except OSError as error:
                raise TrainingError(
                    f"{path}: cannot be read: {error.strerror}", local=True
                ) from error
            if len(piece) < take:
                raise TrainingError(f"{path}: became shorter while it was read", local=True)
            pieces.append(piece)
            begin, length, index = begin + take, length - take, index + 1
        return b"".join(pieces)


def _text_files(pattern: str) -> tuple[list[str], list[int]]:
    """Return the paths and sizes of the files that match, sorted, without empty ones."""
    if not pattern:
        raise RequestError("text: must be followed by a file name or pattern")
    found = named(pattern)
    try:
        for path in found:
            with Path(path).open("rb"):
                pass
        sizes = [Path(path).stat().st_size for path in found]
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be read: {error.strerror}") from error
    kept = [(path, size) for path, size in zip(found, sizes, strict=True) if size]
    if not kept:
        raise RequestError(f"the files that match {pattern} are empty")
    return [path for path, _ in kept], [size for _, size in kept]


def open_source(config: Config, setting: str, *, convert: bool = True) -> Source:
    """Open what dataset_path or eval_dataset_path names: find its files, and check them.

    Raises RequestError for a source that is unknown, missing or broken; without `convert`,
    NotConverted for lines: with files that are still to be converted.
    """
    data, training = config.data, setting == "dataset_path"
    path = getattr(data, setting)
    if path.startswith(STREAM):
        if training and (data.n_samples_to_skip or data.position_weighting):
            name = "n_samples_to_skip" if data.n_samples_to_skip else "position_weighting"
            raise RequestError(
                f"{name}: not possible with a stream; fix: tokenize it to a set on disk or packed "
                "files"
            )
        shards = open_shards(config, setting)
        if not training:
            require_held_out(config, shards)
        return shards
    samples = open_samples(
        path,
        data.seq_length,
        setting,
        config.model.sizes.vocab_size,
        config.run.seed,
        position_weighting=training and data.position_weighting,
        split=data.dataset_split if training else data.eval_split,
        document_end=data.document_end,
        shuffled=training,
        convert=convert,
        data_cache=data.data_cache,
    )
    if not training:
        require_held_out(config, samples)
    return samples


def open_data(
    config: Config, source: Source, rank: int, world_size: int, device: torch.device
) -> Prefetcher:
    """Open training data to be read ahead, checked against the model before the first step.

    Raises RequestError for a source that is too short or has token ids beyond the model's
    vocabulary.
    """
    reopen = partial(feed_of, config, "dataset_path", source, rank, world_size)
    return Prefetcher(
        reopen(),
        reopen,
        workers=config.data.num_workers,
        prefetch=config.data.prefetch,
        device=device,
    )


def feed_of(config: Config, setting: str, source: Source, rank: int, world_size: int) -> DataFeed:
    """Make one rank's feed of a source; each file is opened only when it is read.

    Held-out data is read in order and once. Raises RequestError as open_data does.
    """
    data, training = config.data, setting == "dataset_path"
    feed: DataFeed
    if isinstance(source, Shards):
        feed = stream_of(config, setting, source, rank, world_size)
    else:
        feed = Reader(
            source,
            batch_size=data.batch_size if training else data.eval_batch_size or data.batch_size,
            seed=config.run.seed,
            rank=rank,
            world_size=world_size,
            accumulation=data.gradient_accumulation if training else 1,
            step_sequences=data.global_batch if training else 0,
            # A mixture has an order of its own.
            shuffle=training and not isinstance(source, Mixture),
            skip=data.n_samples_to_skip if training else 0,
            epochs=data.epochs if training else 1,
            to_the_end=not training,
            setting=setting,
        )
    feed.documents = _begins_anew(feed, config, setting)
    _require_vocabulary(feed, config, setting)
    return feed


def open_feed(config: Config, rank: int, world_size: int) -> DataFeed:
    """Open one rank's training data without the other ranks. Raises RequestError."""
    source = open_source(config, "dataset_path")
    return feed_of(config, "dataset_path", source, rank, world_size)


def open_evaluation(config: Config, rank: int, world_size: int) -> DataFeed | None:
    """Open held-out data without the other ranks; None if there is none. Raises RequestError."""
    if not config.data.eval_dataset_path:
        return None
    source = open_source(config, "eval_dataset_path")
    return feed_of(config, "eval_dataset_path", source, rank, world_size)


def _begins_anew(feed: DataFeed, config: Config, setting: str) -> bool:
    """Return whether state is reset at each document. Raises RequestError if that is impossible."""
    asked = config.data.reset_documents
    if asked and not feed.knows_documents:
        raise RequestError(
            f"reset_documents: {setting} does not know where its documents begin; fix: give "
            "document_end, the id that ends one, or a set made by python -m training.data.tokenize"
        )
    if asked is None:
        # The models of smp know no documents; parallel.sagemaker.limits refuses the setting.
        return feed.knows_documents and config.parallel.backend != "smp"
    return asked


def _require_vocabulary(feed: DataFeed, config: Config, setting: str) -> None:
    if (there := config.model.sizes.vocab_size) < feed.vocab_size:
        raise RequestError(
            f"{setting}: has token ids up to {feed.vocab_size - 1:,}, but {config.model.name} has "
            f"a vocabulary of {there:,}; fix: set its vocab_size to {feed.vocab_size:,} or more"
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
    document_end: int = -1,
    shuffled: bool = False,
    convert: bool = True,
    data_cache: str = "",
) -> Samples:
    """Open a source by its kind, for a model's vocabulary. Raises RequestError naming the setting.

    shuffled: a Reader will read it in random order. convert, data_cache: see
    training.data.lines.Lines.

    text:GLOB           files as bytes
    packed:GLOB         packed tokens, 16 bits of id and 14 of position; packed-17/13:GLOB
    lines:FOLDER        *.json and *.json.gz, an object a line with input_ids and attention_mask
    synthetic:          random tokens
    mixture:FILE        several of these, as a YAML list of {path, weight, order}
    a folder            a Hugging Face set on disk; if it has splits, `split` is read, also within a
                        mixture
    """
    kind, separator, rest = path.partition(":")
    if position_weighting and kind not in (*_PACKED_KINDS, "mixture"):
        raise RequestError("position_weighting: only packed data has positions")
    try:
        if kind == "text" and separator:
            return Text(rest, seq_length, vocab_size)
        if kind in _PACKED_KINDS and rest:
            return Packed(
                rest,
                seq_length,
                layout=_PACKED_KINDS[kind],
                vocab_size=vocab_size,
                position_weighting=position_weighting,
                shuffled=shuffled,
            )
        if kind == "lines" and rest:
            return Lines(
                Path(rest),
                seq_length,
                seed=seed,
                document_end=document_end,
                shuffled=shuffled,
                convert=convert,
                data_cache=data_cache,
            )
        if path == "synthetic:":
            return Synthetic(seq_length, vocab_size, seed=seed)
        if kind == "mixture" and rest:
            return _mixture(
                *(Path(rest), seq_length, vocab_size, seed),
                position_weighting,
                split,
                document_end,
                convert,
                data_cache,
            )
        if os.path.isdir(path):  # noqa: PTH112 - it never raises
            return Arrow(path, seq_length, split, document_end)
    except RequestError as error:
        raise RequestError(f"{setting}: {error}") from error
    if known := how_to_read(path, seq_length):
        raise RequestError(f"{setting}: {known}")
    raise RequestError(
        f"{setting}: {path!r} is not a known source; fix: use text:GLOB, packed:GLOB, "
        "packed-17/13:GLOB, lines:FOLDER, synthetic:, mixture:FILE, stream:NAME or the folder "
        "of a Hugging Face set, such as 'text:/usr/lib/python3.11/**/*.py'"
    )


def _mixture(
    file: Path,
    seq_length: int,
    vocab_size: int,
    seed: int,
    position_weighting: bool,
    split: str,
    document_end: int,
    convert: bool,
    data_cache: str,
) -> Mixture:
    """Open the sources that a file lists. Raises RequestError naming the file and the entry."""
    sources = []
    for path, weight, order, where in listed(file):
        samples = open_samples(
            *(path, seq_length, f"{where}: path", vocab_size, seed),
            position_weighting=position_weighting and _has_positions(path),
            split=split,
            document_end=document_end,
            convert=convert,
            data_cache=data_cache,
        )
        sources.append(Part(name=path, samples=samples, weight=weight, order=order))
    if position_weighting and not any(_has_positions(source.name) for source in sources):
        raise RequestError(f"position_weighting: {file} lists no packed data, which has positions")
    return Mixture(sources, seed=seed)


def _has_positions(path: str) -> bool:
    """Return whether a source is packed, or a mixture that lists packed sources."""
    kind, _, rest = path.partition(":")
    if kind == "mixture":
        return any(_has_positions(entry.path) for entry in listed(Path(rest)))
    return kind in _PACKED_KINDS
