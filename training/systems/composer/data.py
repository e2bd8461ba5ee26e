"""The packed mixture as a torch DataLoader for Composer, and the held-out data.

All ranks share one order: step s takes the samples s * G ... (s + 1) * G - 1 of the mixture, G
being the global batch, and each rank its own row of them. Composer asks the data set for its state
at each checkpoint and gives it back, so a resumed run reads on without reading anything again.

Composer's epoch is the whole run here, plus one step: the end of an epoch would reset the count of
samples, by which Composer tells the data set how far it was read.

A batch is a dict: inputs and targets (b, l), weights (b, l) if targets are weighted, and in a
micro-batch total (), the divisor of its loss. Over a step's micro-batches Composer sums
loss x (share of the rank's samples), and takes the mean over the ranks. `total` is such that the
result is the sum over all targets that count in the whole step, divided by their number: the loss
depends on neither the micro-batch's size nor the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from composer.core import DataSpec, Evaluator
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from training.data.base import Sample, Samples, stacked
from training.data.mixture import Mixture, Source
from training.data.packed import Packed, count_tokens, require_held_out
from training.data.sampler import OTHER_DATA
from training.errors import RequestError
from training.ops.loss import counted
from training.systems.composer.config import SEED, ComposerConfig

Batch = dict[str, Tensor]

Say = Callable[[str], None]


def collate(samples: list[Sample]) -> Batch:
    """Make a batch of samples, of which all have weights or none has."""
    rows = stacked(samples)
    batch = {"inputs": rows.inputs, "targets": rows.targets}  # (b, l) each
    return batch if rows.weights is None else {**batch, "weights": rows.weights}  # (b, l)


def samples_in(batch: Batch) -> int:
    return len(batch["inputs"])


def tokens_in(batch: Batch) -> int:
    """Count a rank's tokens as the system does: one more per sample than it has targets."""
    samples, length = batch["inputs"].shape
    return samples * (length + 1)


def cut(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into parts of `size` samples; the last may have fewer."""
    return [
        {name: one[at : at + size] for name, one in batch.items()}  # (size, l)
        for at in range(0, samples_in(batch), size)
    ]


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """Cut a rank's part of a step, which must be a multiple of `size` (a collective call)."""
    parts = cut(batch, size)
    total = counted(batch["targets"], batch.get("weights"))  # ()
    if torch.cuda.is_available():
        total = total.cuda()  # (): NCCL reduces only tensors on GPUs
    dist.all_reduce(total)
    share = (total / (len(parts) * dist.get_world_size())).clamp(min=1e-30)  # (): avoids 0 / 0
    return [{**part, "total": share} for part in parts]


class Windows(Dataset[Sample]):
    """Numbered samples, and where the run reads next.

    A process that reads ahead opens the files itself.
    """

    def __init__(
        self, open_samples: Callable[[], Samples], skip: int = 0, say: Say = print
    ) -> None:
        self._open, self._say = open_samples, say
        self.samples: Samples | None = open_samples()
        self.skip = self.first = self.position = skip

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": self._open, "samples": None}

    def __len__(self) -> int:
        return len(self._opened())

    def __getitem__(self, place: int) -> Sample:
        """Return the sample at a place of the order, which starts over after its last."""
        samples = self._opened()
        return samples[place % len(samples)]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the position after so many samples over all ranks, as Composer counts them."""
        return {"first": self.first, "samples": num_samples, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint was; if it read other data, at the beginning of this data."""
        if state["fingerprint"] == self.fingerprint:
            self.first = state["first"]
        else:
            self._say(f"WARNING: data: {OTHER_DATA}")
            self.first = self.skip - state["samples"]
        self.position = self.first + state["samples"]

    @property
    def fingerprint(self) -> str:
        return self._opened().fingerprint

    def _opened(self) -> Samples:
        if self.samples is None:
            self.samples = self._open()
        return self.samples


class InOrder(DistributedSampler[int]):
    """A rank's places in the order, from its data set's position, for a number of steps."""

    def __init__(self, windows: Windows, steps: int, batch_size: int) -> None:
        super().__init__(
            windows, dist.get_world_size(), dist.get_global_rank(), shuffle=False, drop_last=True
        )
        self.windows, self.steps, self.rank_batch = windows, steps, batch_size

    def __iter__(self) -> Iterator[int]:
        first = self.windows.position + self.rank * self.rank_batch
        for step in range(self.steps):
            begin = first + step * self.rank_batch * self.num_replicas
            yield from range(begin, begin + self.rank_batch)

    def __len__(self) -> int:
        return self.steps * self.rank_batch


def open_sources(config: ComposerConfig) -> list[Source]:
    """Open the parts of the training data. Raises RequestError naming the key and the entry."""
    data = config.data
    return [
        Source(
            name=part.path,
            samples=_packed(config, part.path, f"data.{name}: entry {number}", training=True),
            weight=part.weight,
            order=part.order,
        )
        for name, parts in (("text_paths", data.text_paths), ("code_paths", data.code_paths))
        for number, part in enumerate(parts, 1)
    ]


def open_mixture(config: ComposerConfig) -> Mixture:
    """Open the training data as one mixture. Raises RequestError."""
    sources = open_sources(config)
    try:
        return Mixture(sources, seed=SEED)
    except RequestError as error:
        raise RequestError(f"data: {error}") from error


def training_data(config: ComposerConfig, say: Say) -> DataSpec:
    """Open and check a rank's training data. Raises RequestError."""
    data = config.data
    windows = Windows(partial(open_mixture, config), data.n_samples_to_skip, say)
    _note(windows, config, say)
    size = data.global_batch_size // dist.get_world_size()
    ahead: dict[str, Any] = {}
    if data.num_workers:
        # A fork fails if a network card's memory is in huge pages (EFA).
        ahead = {"prefetch_factor": data.prefetch_factor, "multiprocessing_context": "spawn"}
    loader = DataLoader(
        windows,
        batch_size=size,
        sampler=InOrder(windows, config.num_steps + 1, size),
        num_workers=data.num_workers,
        collate_fn=collate,
        drop_last=True,
        **ahead,
    )
    return DataSpec(
        loader,
        split_batch=micro_batches,
        get_num_samples_in_batch=samples_in,
        get_num_tokens_in_batch=tokens_in,
    )


def held_out(config: ComposerConfig, say: Say) -> list[Evaluator]:
    """Open the held-out data: the first batches of each set, in order, each sample once.

    Raises RequestError, also for a file that is trained on.
    """
    data = config.data
    trained = [file for source in open_sources(config) for file in _files(source.samples)]
    if not data.eval_paths:
        say("data.eval_paths: there are none, so nothing is evaluated")
    found = []
    for number, one in enumerate(data.eval_paths, 1):
        where = f"data.eval_paths: entry {number}"
        packed = _packed(config, one.path, where, training=False)
        if not len(packed):
            raise RequestError(
                f"{where}: {one.path} has {packed.described()}, which make no sample of seq_len "
                f"{data.seq_len}"
            )
        try:
            require_held_out(_files(packed), trained)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
        loader: DataLoader[Sample] = DataLoader(
            packed,  # type: ignore[arg-type]  # it has a length, and items by number
            batch_size=data.eval_batch_size,
            # Composer drops the samples that this sampler adds to give all ranks equally many.
            sampler=DistributedSampler(
                packed,  # type: ignore[arg-type]
                dist.get_world_size(),
                dist.get_global_rank(),
                shuffle=False,
            ),
            collate_fn=collate,
        )
        spec = DataSpec(
            loader,
            split_batch=cut,
            get_num_samples_in_batch=samples_in,
            get_num_tokens_in_batch=tokens_in,
        )
        found.append(Evaluator(label=one.label, dataloader=spec))
    return found


def _packed(config: ComposerConfig, path: str, where: str, *, training: bool) -> Packed:
    try:
        return Packed(
            path,
            config.data.seq_len,
            vocab_size=config.model.vocab_size,
            position_weighting=training and config.general.position_weighting,
        )
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error


def _files(samples: Samples) -> list[str]:
    assert isinstance(samples, Packed)
    return samples.files


def _note(windows: Windows, config: ComposerConfig, say: Say) -> None:
    """Report oddities of the data, and the parts of it that the run reads more than once."""
    mixture, data = windows.samples, config.data
    assert isinstance(mixture, Mixture)
    for note in mixture.notes:
        say(f"data: {note}")
    files = {file for source in open_sources(config) for file in _files(source.samples)}
    tokens = sum(count_tokens(str(file)) for file in files)
    if data.n_total_tokens not in (0, tokens):
        say(f"data.n_total_tokens: is {data.n_total_tokens:,}, but the files have {tokens:,}")
    samples = data.n_samples_to_skip + config.num_steps * data.global_batch_size
    for name, passes in mixture.passes(samples).items():
        if passes > 1:
            say(f"data: {name} will be read {passes:.1f} times")
