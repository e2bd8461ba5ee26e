"""Rows that ranks share give each rank its part of the whole rows' outputs and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.training.support.documents import numbers
from tests.training.support.pieces_spread import DOCUMENTS, DRAWN, ENDS, operations
from tests.training.support.runs import run
from training.errors import RequestError
from training.ops.documents import Documents
from training.ops.pieces import ContextGroup, Piece

ROWS = torch.zeros(2, 10)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_operation_is_that_of_the_whole_rows(ranks: int) -> None:
    """Pieces of 3 to 147 positions; documents that end with a piece, beside it and across three.

    Random pieces and documents, too.
    """
    done = run(ranks, program=("-m", "tests.training.support.pieces_spread"), timeout=600)
    assert done.returncode == 0, done.stderr
    names = [name for name, *_ in operations(torch.float32)]
    shown = [line.partition(":")[0] for line in done.stdout.splitlines() if ": " in line]
    assert shown == [
        f"{name} {cut} {kind} {dtype}"
        for dtype in (torch.float64, torch.float32)
        for name in names
        for cut in ENDS
        for kind in DOCUMENTS
    ] + [f"{name} drawn {seed}" for seed in range(DRAWN) for name in names]


def test_rows_are_cut_as_evenly_as_can_be() -> None:
    pieces = [ContextGroup(rank, 4, None).piece(ROWS, None) for rank in range(4)]
    assert [(one.start, one.stop) for one in pieces] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert {tuple(one.lengths) for one in pieces} == {(2, 3, 2, 3)}
    assert [one.positions.tolist() for one in pieces] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_a_piece_has_the_documents_of_its_rows() -> None:
    lengths = [[4, 1, 5], [10]]
    whole = Documents(numbers(lengths))
    piece = Piece.of_rows(ContextGroup(1, 3, None), (3, 5, 10), ROWS, whole.seq_idx)
    assert piece.begins.tolist() == [[False, True], [False, False]]
    assert piece.positions.tolist() == [[3, 0], [3, 4]]
    assert piece.is_cut(-1, 2) and piece.is_cut(0, 2) and not piece.is_cut(-1, 1)
    around, sight = piece.around(4), piece.sight
    assert around is not None and around.seq_idx.tolist() == [[0, 0, 0, 0, 0, 1], [0] * 6]
    assert sight is not None and sight.seq_idx.tolist() == whole.seq_idx[:, :5].tolist()
    assert piece.holds(whole.positions) is False
    whole_of_piece = piece.whole
    assert whole_of_piece is not None
    kept = whole_of_piece.once("kept", lambda: torch.zeros(3))  # type: ignore[arg-type]
    assert piece.holds(kept)


def test_ranks_and_taps_that_rows_are_too_short_for_are_refused() -> None:
    with pytest.raises(RequestError, match="11 ranks cannot share a row of 10 tokens"):
        ContextGroup(0, 11, None).piece(ROWS, None)
    piece = ContextGroup(0, 4, None).piece(ROWS, None)
    with pytest.raises(RequestError, match="a piece of 2 tokens is shorter than the 3 inputs"):
        piece.led(torch.zeros(2, 2, 5), 3)


@pytest.mark.parametrize("last", [12, 7, 1])
def test_the_documents_of_the_last_queries_end_where_those_of_the_keys_do(last: int) -> None:
    documents = Documents(numbers([[5, 1, 6], [12], [1, 11]]))
    ends = documents.last_seqlens(last).tolist()
    assert documents.last_seqlens(last).dtype == torch.int32
    # What each document of `cu_seqlens` has among the last positions of its row.
    assert [b - a for a, b in pairwise(ends)] == [
        *(max(0, last - 7), int(last > 6), min(last, 6), last, max(0, last - 11), min(last, 11)),
    ]
