"""AdamW with float32 master weights, sharded over the ranks that read data (ZeRO-1) or not.

Rajbhandari et al. 2020, "ZeRO", section 5.1: a rank keeps the master weights and both moments of
some rows of every parameter. Gradients are summed to the rank that keeps the rows, and the updated
rows go back to all ranks. If not sharded, every rank does all of it, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from training import compat
from training.config.config import OptimConfig
from training.parallel.neuron.places import Place
from training.parallel.optimizer import decays
from training.parallel.share import Share

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Box:
    """A box of a larger tensor: where it begins, and its values in host memory."""

    offsets: tuple[int, ...]
    value: Tensor  # the box's shape

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.value.shape)


class Boxes(torch.Tensor):
    """Stands for a whole tensor of which this rank has some boxes, or none.

    Torch's own class for this, DTensor, is cut by one rule in each dimension; a rank here has some
    rows of each of several parts. The last three methods are the protocol that torch's distributed
    checkpoint expects of tensors.
    """

    boxes: Sequence[Box]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, boxes: Sequence[Box]) -> Boxes:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.boxes = tuple(boxes)
        return made  # type: ignore[no-any-return]

    def copied(self) -> Boxes:
        """Return a copy with its own values."""
        copies = [Box(one.offsets, one.value.clone()) for one in self.boxes]
        return Boxes(self.shape, self.dtype, copies)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function}: Boxes hold what a checkpoint holds, no values")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Boxes({tuple(self.shape)}, {self.dtype}, {len(self.boxes)} here)"

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, one.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(one.chunk, properties, self.shape),
            )
            for one in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [one.chunk for one in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(one.value for one in self.boxes if one.chunk.offsets == index.offset)


@dataclass(frozen=True)
class Piece:
    """A parameter of this rank's model, and the rows whose master weights this rank keeps."""

    parameter: nn.Parameter  # (n, ...)
    place: Place
    whole: torch.Size  # of the model's parameter
    master: nn.Parameter  # (rows, ...); the parameter itself if it needs no copy
    first: int  # row


class MasterAdamW(torch.optim.AdamW):
    """AdamW on master weights. `zero1`: sharded; `wide`: in float32, whatever the model's dtype.

    Gradients of a narrower dtype are summed in float32 over the batches of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        places: dict[str, tuple[Place, torch.Size]],
        config: OptimConfig,
        tensor: Share,
        data: Share,
        *,
        zero1: bool,
        wide: bool,
    ) -> None:
        """`places`: by parameter name, its place, and the shape of the whole model's parameter."""
        self.tensor, self.data, self.zero1 = tensor, data, zero1 and data.size > 1
        self._hosts: list[tuple[Tensor, Tensor]] = []  # what `restore` copies from host to device
        self.pieces = [
            self._piece(parameter, *places[name], wide)
            for name, parameter in model.named_parameters()
        ]
        masters: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for piece in self.pieces:
            masters[config.decay_all or decays(piece.place.name)].append(piece.master)
        super().__init__(
            [
                {"params": masters[True], "weight_decay": config.weight_decay},
                {"params": masters[False], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )
        for piece in self.pieces:  # so that a checkpoint can be read before the first step
            self.state[piece.master] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(piece.master) for name in MOMENTS},  # (rows, ...)
            }
            if wide and piece.parameter.dtype != torch.float32:
                piece.parameter.register_post_accumulate_grad_hook(_widen)

    def clip(self, threshold: float) -> Tensor:
        """Reduce the gradients to the masters and scale them; return the norm before, ()."""
        square = torch.zeros((), device=self.pieces[0].parameter.device)  # ()
        for piece in self.pieces:
            gradient = self._reduced(piece)
            piece.master.grad = gradient
            if gradient is not None:
                square += gradient.float().square().sum() / self._holders(piece)
        dist.all_reduce(square)
        norm = square.sqrt()  # ()
        scale = (threshold / (norm + 1e-6)).clamp(max=1)  # ()
        for piece in self.pieces:
            if piece.master.grad is not None:
                piece.master.grad.mul_(scale)
        return norm  # ()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.give()

    @torch.no_grad()
    def give(self) -> None:
        """Copy the masters' values to the model's parameters on all ranks."""
        for piece in self.pieces:
            if piece.master is piece.parameter:
                continue
            rows = piece.master  # (rows, ...)
            if self.zero1:
                own = self._padded(rows.detach(), self._rows(piece))  # (rows of a rank, ...)
                every = own.new_empty(own.shape[0] * self.data.size, *own.shape[1:])
                compat.all_gather(every, own, self.data.group)
                rows = every[: len(piece.parameter)]  # type: ignore[assignment]  # (n, ...)
            piece.parameter.copy_(rows)  # (n, ...)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for piece in self.pieces:
            piece.parameter.grad = piece.master.grad = None
            vars(piece.parameter).pop("main_grad", None)

    def checkpointed(self) -> dict[str, Any]:
        """Return the state as a checkpoint holds it: whole parameters by the model's own names."""
        by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.place.name, []).append(piece)
        weights: dict[str, Boxes] = {}
        moments: dict[str, dict[str, Any]] = {}
        self._hosts = []
        for name, pieces in by_name.items():
            weights[name] = self._boxes(pieces, [piece.master for piece in pieces])
            states = [self.state[piece.master] for piece in pieces]
            moments[name] = {"step": states[0]["step"]}
            for moment in MOMENTS:
                moments[name][moment] = self._boxes(pieces, [one[moment] for one in states])
        return {"model": weights, "optimizer": {"state": moments}}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint has loaded into the result of `checkpointed`."""
        for home, host in self._hosts:
            home.copy_(host)  # its shape
        self._hosts = []
        for piece in self.pieces:  # parts of one parameter have one count
            found = state["optimizer"]["state"][piece.place.name]["step"]
            self.state[piece.master]["step"].copy_(found)
        self.give()

    def _boxes(self, pieces: list[Piece], values: list[Tensor]) -> Boxes:
        """Make one tensor of this rank's parts of a parameter; values (rows, ...) each.

        A device returns each value whole, as cutting it there would mean compiling a program.
        """
        found = []
        for piece, value in zip(pieces, values, strict=True):
            home = value.detach()  # (rows, ...)
            host = home.cpu()  # (rows, ...): itself if it is there already
            if home.device.type != "cpu":
                self._hosts.append((home, host))
            found += [Box(*box) for box in piece.place.boxes(host, piece.first)]
        return Boxes(pieces[0].whole, values[0].dtype, found)

    def _piece(self, parameter: nn.Parameter, place: Place, whole: torch.Size, wide: bool) -> Piece:
        dtype = torch.float32 if wide else parameter.dtype
        if not self.zero1 and parameter.dtype == dtype:
            return Piece(parameter, place, whole, parameter, 0)
        each = -(-len(parameter) // self.data.size) if self.zero1 else len(parameter)
        first = min(self.data.rank * each, len(parameter)) if self.zero1 else 0
        rows = parameter.detach()[first : first + each]  # (rows, ...)
        return Piece(parameter, place, whole, nn.Parameter(rows.to(dtype, copy=True)), first)

    def _reduced(self, piece: Piece) -> Tensor | None:
        """Return the mean, over the ranks that read data, of this rank's rows, (rows, ...)."""
        gradient = getattr(piece.parameter, "main_grad", piece.parameter.grad)  # (n, ...)
        if gradient is None:
            return None
        dtype = piece.master.dtype
        if self.zero1:
            each = self._rows(piece)
            padded = self._padded(gradient.to(dtype), each * self.data.size)
            own = padded.new_empty(each, *padded.shape[1:])  # (rows of a rank, ...)
            compat.reduce_scatter(own, padded, self.data.group)
            gradient = own[: len(piece.master)]  # (rows, ...)
        elif self.data.size > 1:
            gradient = self.data.sum(gradient.to(dtype))  # (n, ...)
        return (gradient / self.data.size).to(dtype)  # (rows, ...)

    def _rows(self, piece: Piece) -> int:
        """Return the maximum number of rows that a rank keeps."""
        return -(-len(piece.parameter) // self.data.size)

    def _padded(self, rows: Tensor, count: int) -> Tensor:
        """Append zeros, (n, ...) -> (count, ...)."""
        return F.pad(rows, (*[0] * (2 * rows.dim() - 2), 0, count - len(rows)))  # (count, ...)

    def _holders(self, piece: Piece) -> int:
        """Count the ranks that have the same rows of the same parameter."""
        readers = 1 if self.zero1 else self.data.size
        return readers * (self.tensor.size if piece.place.slices is None else 1)


def copied(state: Any) -> Any:
    """Copy a nested state into memory of its own."""
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    if isinstance(state, Boxes):
        return state.copied()
    return state.clone() if isinstance(state, Tensor) else state


def _widen(parameter: Tensor) -> None:
    """Add a gradient to the step's float32 sum."""
    assert parameter.grad is not None
    before = getattr(parameter, "main_grad", None)  # (n, ...)
    wide = parameter.grad.float()  # (n, ...)
    parameter.main_grad = wide if before is None else before.add_(wide)  # type: ignore[attr-defined]
    parameter.grad = None
