"""What all language models are: an embedding, a stack of blocks, a norm, an output embedding.

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
"""What one block remembers of the tokens before, for generation; the block says what."""


class Block(nn.Module):
    """One layer: the unit of sharding, recomputation and compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False  # keep only the input, compute the rest again in the backward pass
        self.kept: Callable[[], Any] = noop_context_fn  # what a recomputed block keeps beside it
        self.saving: Saving = _here

    def forward(self, hidden: Tensor, *context: Any) -> Tensor:
        """(b, l, m) -> (b, l, m); `context` is what the model gives all its blocks."""
        if not torch.is_grad_enabled():
            return self.inner(hidden, *context)  # (b, l, m)
        with self.saving(self, context):
            if not self.recompute:
                return self.inner(hidden, *context)  # (b, l, m)
            return checkpoint(
                self.inner, hidden, *context, use_reentrant=False, context_fn=self.kept
            )  # (b, l, m)

    def inner(self, hidden: Tensor, *context: Any) -> Tensor:
        """Compute `forward`; this is what is recomputed and compiled."""
        raise NotImplementedError

    def start(self, batch: int, length: int) -> State:
        """Make the state before the first token, for a text of at most `length` tokens."""
        raise NotImplementedError

    def advance(self, hidden: Tensor, state: State) -> Tensor:
        """Compute `inner` for the tokens that come next, and bring the state up to date.

        (b, l, m) -> (b, l, m), for any l >= 1.
        """
        raise NotImplementedError


Saving = Callable[[Block, tuple[Any, ...]], AbstractContextManager[None]]
"""Around a block's forward pass, given its context: where it keeps what the backward pass needs."""


def _here(block: Block, context: tuple[Any, ...]) -> AbstractContextManager[None]:
    return nullcontext()


class LanguageModel(nn.Module):
    """A model that gives each position the logits of the token that follows."""

    config: Sizes

    def __init__(self) -> None:
        super().__init__()
        self.tied: dict[str, str] = {}
        """Second names of parameters -> the first, where the embeddings are one."""
        self.context_group: ContextGroup | None = None
        """The ranks that have a piece of every row each; None where this one has whole rows."""

    def tie(self, names: dict[str, str]) -> None:
        """Let second names be the parameters of the first, where the sizes ask for it."""
        if not self.config.tie_embeddings:
            return
        self.tied = names
        for second, first in names.items():
            owner, _, attribute = second.rpartition(".")
            self.get_submodule(owner).register_parameter(attribute, self.get_parameter(first))

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter, in every place of the model that has it."""
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
        """What every block is given beside the stream: positions, masks, documents."""
        raise NotImplementedError

    def finish(self, hidden: Tensor) -> Tensor:
        """The final norm, (b, l, m) -> (b, l, m)."""
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
        """Logits (b, l, v), or with targets (b, l) the loss (), without holding the logits.

        mask (b, l): False where there is padding. The loss is the mean over the targets that are
        not -100, or their sum, weighted with `weights` (b, l), over `total` (). seq_idx (b, l),
        int32: the number of each position's document in its row, from 0 on; each is then computed
        as if it were alone. Without it, a row is one.

        With a context group all its ranks are given the same rows, and each takes its piece of
        them: l in the results is the piece's, and the loss is its part of the sum over `total`.
        Raises RequestError for padding then.
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
        """Compute `forward` for what this rank has of the rows."""
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
        """(b, l, m), (b, l) -> the loss (), as `forward` tells."""
        return next_token_cross_entropy(hidden, self.output, targets, weights, total)  # ()

    def start(self, batch: int, length: int) -> list[State]:
        """Make every block's state before the first token."""
        return [block.start(batch, length) for block in self.blocks]

    @torch.no_grad()
    def advance(self, input_ids: Tensor, states: list[State]) -> Tensor:
        """Logits (b, v) of the token after these; the states are brought up to date.

        input_ids (b, l) with l >= 1 are the tokens after those that the states have seen.
        """
        hidden = self.embed(input_ids)  # (b, l, m)
        for block, state in zip(self.blocks, states, strict=True):
            hidden = block.advance(hidden, state)  # (b, l, m)
        return self.finish(hidden[:, -1:])[:, 0] @ self.output.t()  # (b, v)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Make the first value of a parameter: a pure function of its name and the seed.

        So each rank can make the part that it owns, whatever the number of ranks.
        """
        raise NotImplementedError


def random_for(name: str, seed: int) -> torch.Generator:
    """Make the source of a parameter's first value."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def wide(x: Tensor) -> Tensor:
    """Float32, or float64 where x is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
