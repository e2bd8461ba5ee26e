"""Operations on rows that ranks share, compared with one rank: outputs and all gradients.

    torchrun --nproc_per_node=N -m tests.training.support.pieces_spread

Each rank computes with its piece of the rows, of whatever length, and with the whole rows. Writes a
line for each case; the last ones draw the pieces and documents at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.ops.test_scan import made as scan_inputs
from tests.training.ops.test_ssd import ssd_inputs
from tests.training.support.documents import cut, numbers
from training.entrypoint import leave
from training.ops.attention import attention
from training.ops.conv import causal_conv1d
from training.ops.documents import Documents
from training.ops.pieces import ContextGroup, Piece
from training.ops.scan import selective_scan
from training.ops.ssd import ssd
from training.process_group import start, stop

LENGTH, TAPS = 150, 4
ENDS = {
    "even": {1: (150,), 2: (75, 150), 3: (50, 100, 150), 4: (37, 75, 112, 150)},
    "uneven": {1: (150,), 2: (3, 150), 3: (80, 83, 150), 4: (70, 73, 78, 150)},
}
"""Where the pieces end, by number of ranks."""
DOCUMENTS = {
    "whole": None,
    "documents": [[20, 17, 1, 1, 36, 40, 35], [150], [74, 1, 3, 72]],  # on the ends, beside, across
}
DRAWN = 6
"""Number of random draws of pieces and documents."""
Inputs = dict[str, Tensor]
Run = Callable[[Mapping[str, Any], Documents | None], Tensor]


def operations(dtype: torch.dtype) -> Iterator[tuple[str, Inputs, tuple[str, ...], Run]]:
    """Yield a name, the inputs, the names of those with a length, and the computation."""

    def normal(*shape: int, seed: int = 0) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=random, dtype=dtype).requires_grad_()

    conv = {"x": normal(3, LENGTH, 5), "weight": normal(5, 1, TAPS), "bias": normal(5)}
    for silu in (False, True):
        yield (
            f"conv {silu}",
            conv,
            ("x",),
            lambda i, d, s=silu: causal_conv1d(  # type: ignore[misc]
                **i, silu=s, documents=d
            ),
        )
    two = ssd_inputs(3, LENGTH, 4, 3, 2, 5, dtype=dtype)
    for limit in ((0.0, float("inf")), (0.3, 1.2)):
        yield (
            f"ssd {limit}",
            two,
            ("x", "dt", "B", "C"),
            lambda i, d, u=limit: ssd(  # type: ignore[misc]
                **i, chunk=16, limit=u, documents=d
            ),
        )
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    for gated in (True, False):
        one = dict(zip(names, scan_inputs(3, LENGTH, 4, 3, dtype, gated), strict=gated))
        long = ("x", "dt", "B", "C", "z")
        yield f"scan {gated}", one, long, lambda i, d: selective_scan(**i, documents=d)
    heads = {name: normal(3, LENGTH, h, 6, seed=h) for name, h in (("q", 4), ("k", 2), ("v", 2))}
    heads["v"] = normal(3, LENGTH, 2, 6, seed=9)
    for window in (0, 7, 100):
        yield (
            f"attention {window}",
            heads,
            ("q", "k", "v"),
            lambda i, d, w=window: attention(  # type: ignore[misc]
                **i, window=w, documents=d
            ),
        )


def main() -> None:
    world = start("cpu")
    ranks = ContextGroup(world.rank, world.world_size, dist.group.WORLD)
    for dtype, within in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        for name, inputs, along, run in operations(dtype):
            for evenness, ends in ENDS.items():
                for kind, lengths in DOCUMENTS.items():
                    seq_idx = None if lengths is None else numbers(lengths)
                    piece = Piece.of_rows(ranks, ends[ranks.size], inputs[along[0]], seq_idx)
                    apart = compare(inputs, along, run, piece, seq_idx)
                    case = f"{name} {evenness} {kind} {dtype}: {apart:.1e}"
                    assert apart <= within, case
                    if world.rank == 0:
                        print(case, flush=True)
    for seed in range(DRAWN):
        random = torch.Generator().manual_seed(seed)
        for name, inputs, along, run in operations(torch.float64):
            lengths = [documents(random) for _ in range(3)]
            seq_idx = numbers(lengths)
            stops = [*drawn(random, ranks.size - 1), LENGTH]
            piece = Piece.of_rows(ranks, stops, inputs[along[0]], seq_idx)
            apart = compare(inputs, along, run, piece, seq_idx)
            case = f"{name} drawn {seed}: {apart:.1e}"
            assert apart <= 1e-9, f"{case}, pieces up to {stops} of {lengths}"
            if world.rank == 0:
                print(case, flush=True)
    stop()


def documents(random: torch.Generator) -> list[int]:
    """Draw the lengths of a row's documents: few long ones, or many with one token."""
    most = [2, 20, 200][int(torch.randint(3, (), generator=random))]
    return cut(random, LENGTH, most)


def drawn(random: torch.Generator, count: int) -> list[int]:
    """Draw the ends of `count` pieces, each at least as long as the taps need."""
    least = TAPS - 1
    free = LENGTH - (count + 1) * least
    at = torch.randint(free + 1, (count,), generator=random).sort().values.tolist()
    return [place + (index + 1) * least for index, place in enumerate(at)]


def compare(
    inputs: Inputs, along: tuple[str, ...], run: Run, piece: Piece, seq_idx: Tensor | None
) -> float:
    """Return how far the piece's output and gradients are from the whole's, at worst on a rank."""
    whole = run(inputs, Documents.of(seq_idx))
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(whole.shape, generator=random, dtype=whole.dtype)
    wanted = torch.autograd.grad((whole * weight).sum(), list(inputs.values()))
    part = {
        name: (piece.own(one) if name in along else one).detach().requires_grad_()
        for name, one in inputs.items()
    }
    y = run(part, piece)
    found = torch.autograd.grad((y * piece.own(weight)).sum(), list(part.values()))
    pairs = [(y, piece.own(whole))]
    for name, mine, theirs in zip(inputs, found, wanted, strict=True):
        if name in along:
            pairs.append((mine, piece.own(theirs)))
        else:
            dist.all_reduce(mine)
            pairs.append((mine, theirs))
    apart = max(float(((a - b).abs() / b.abs().max().clamp(min=1)).max()) for a, b in pairs)
    worst = torch.tensor(apart)  # ()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


if __name__ == "__main__":
    main()
    leave(0)
