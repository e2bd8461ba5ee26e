"""The parts of every language model: embedding, stack of blocks, norm, output embedding.

Shapes: b batch size, l length, m d_model, v vocabulary size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from training.errors import RequestError
from training.models.sizes import Sizes
from training.ops.documents import Documents
from training.ops.loss import next_token_cross_entropy
from training.ops.pieces import ContextGroup

State = dict[str, Tensor]
"""A block's memory of the preceding tokens, for generation; its entries depend on the block."""


class Block(nn.Module):
    """One layer: the unit of sharding, recomputation and compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False  # keep only the input; recompute the rest in the backward pass
        self.kept: Callable[[], Any] = noop_context_fn  # what else a recomputed block keeps
        self.saving: Saving = _here

    def forward(self, hidden: Tensor, *context: Any) -> Tensor:
        """(b, l, m) -> (b, l, m); `context` is what the model passes to all its blocks."""
        if not torch.is_grad_enabled():
            return self.inner(hidden, *context)  # (b, l, m)
        with self.saving(self, context):
            if not self.recompute:
                return self.inner(hidden, *context)  # (b, l, m)
            return checkpoint(
                self.inner, hidden, *context, use_reentrant=False, context_fn=self.kept
            )  # (b, l, m)

    def inner(self, hidden: Tensor, *context: Any) -> Tensor:
        """Compute `forward`; recomputation and compilation apply to this method."""
        raise NotImplementedError

    def start(self, batch: int, length: int) -> State:
        """Return the state before the first token, for a text of at most `length` tokens."""
        raise NotImplementedError

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """Compute `inner` for the next tokens and update the state in place.

        (b, l, m) -> (b, l, m), for any l >= 1.
        """
        raise NotImplementedError


Saving = Callable[[Block, tuple[Any, ...]], AbstractContextManager[None]]
"""Context of a block's forward pass: decides where tensors for the backward pass are kept."""


def _here(block: Block, context: tuple[Any, ...]) -> AbstractContextManager[None]:
    return nullcontext()


class LanguageModel(nn.Module):
    """A model that predicts, at each position, the logits of the next token."""

    config: Sizes

    def __init__(self) -> None:
        super().__init__()
        self.tied: dict[str, str] = {}
        """Second names of parameters -> first names, if the embeddings are tied."""
        self.context_group: ContextGroup | None = None
        """The ranks that each hold a piece of every row; None if this rank has whole rows."""

    def tie(self, names: dict[str, str]) -> None:
        """Make second names refer to the parameters of the first, if the sizes ask for it."""
        if not self.config.tie_embeddings:
            return
        self.tied = names
        for second, first in names.items():
            owner, _, attribute = second.rpartition(".")
            self.get_submodule(owner).register_parameter(attribute, self.get_parameter(first))

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter everywhere it occurs in the model."""
        for alias in (name, *(second for second, first in self.tied.items() if first == name)):
            owner, _, attribute = alias.rpartition(".")
            self.get_submodule(owner).register_parameter(attribute, parameter)

    @property
    def blocks(self) -> list[Block]:
        raise NotImplementedError

    @property
    def output(self) -> Tensor:
        """The output embedding, (v, m)."""
        raise NotImplementedError

    def embed(self, input_ids: Tensor) -> Tensor:
        """(b, l) -> (b, l, m)."""
        raise NotImplementedError

    def context(
        self, hidden: Tensor, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Any, ...]:
        """Return what every block takes besides the stream: positions, masks, documents."""
        raise NotImplementedError

    def finish(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, (b, l, m) -> (b, l, m)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        total: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Return logits (b, l, v) or, given targets (b, l), the loss () without holding the logits.

        mask (b, l) is False at padding. The loss is the mean over the targets that are not -100,
        or, given `total` (), their sum weighted with `weights` (b, l) and divided by it. seq_idx
        (b, l), int32, numbers the document of each position within its row, from 0; each document
        is then computed as if it were alone. Without it, a row is one document.

        With a context group, all its ranks are given the same rows and each takes its piece of
        them: l in the results is then the piece's length, and the loss its part of the sum over
        `total`. Raises RequestError if rows have padding then.
        """
        documents = Documents.of(seq_idx)
        if self.context_group is not None:
            if mask is not None:
                raise RequestError("context_parallel: rows with padding cannot be cut into pieces")
            documents = piece = self.context_group.piece(input_ids, seq_idx)
            input_ids = piece.own(input_ids)  # (b, l)
            targets = None if targets is None else piece.own(targets)  # (b, l)
            weights = None if weights is None else piece.own(weights)  # (b, l)
        return self.compute(input_ids, targets, mask, weights, total, documents)

    def compute(
        self,
        input_ids: Tensor,
        targets: Tensor | None,
        mask: Tensor | None,
        weights: Tensor | None,
        total: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        """Compute `forward` on this rank's part of the rows."""
        hidden = self.embed(input_ids)  # (b, l, m)
        context = self.context(hidden, mask, documents)
        for block in self.blocks:
            hidden = block(hidden, *context)  # (b, l, m)
        hidden = self.finish(hidden)  # (b, l, m)
        if targets is None:
            return self.logits(hidden)  # (b, l, v)
        return self.loss(hidden, targets, weights, total)  # ()

    def logits(self, hidden: Tensor) -> Tensor:
        """(b, l, m) -> (b, l, v)."""
        return hidden @ self.output.t()  # (b, l, v)

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None, total: Tensor | None
    ) -> Tensor:
        """(b, l, m), (b, l) -> the loss (), as described in `forward`."""
        return next_token_cross_entropy(hidden, self.output, targets, weights, total)  # ()

    def start(self, batch: int, length: int) -> list[State]:
        """Return every block's state before the first token."""
        return [block.start(batch, length) for block in self.blocks]

    @torch.no_grad()
    def advance(self, input_ids: Tensor, states: list[State]) -> Tensor:
        """Return the logits (b, v) of the token after these, and update the states in place.

        input_ids (b, l), l >= 1, are the tokens that follow those already in the states.
        """
        hidden = self.embed(input_ids)  # (b, l, m)
        for block, state in zip(self.blocks, states, strict=True):
            hidden = block.advance(hidden, state)  # (b, l, m)
        return self.finish(hidden[:, -1:])[:, 0] @ self.output.t()  # (b, v)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Return a parameter's initial value: a pure function of its name and the seed.

        Each rank can therefore make the part that it owns, whatever the number of ranks.
        """
        raise NotImplementedError


def random_for(name: str, seed: int) -> torch.Generator:
    """Return the random generator for a parameter's initial value."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def wide(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
