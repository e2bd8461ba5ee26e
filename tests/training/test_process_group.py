"""The ranks of a run: what one of them does, however long it takes, the others wait for."""

from __future__ import annotations

import time

import pytest

from tests.training.support.long_work import LIMIT, WORK
from tests.training.support.runs import run

pytestmark = pytest.mark.processes

PROGRAM = ("-m", "tests.training.support.long_work")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_may_take_longer_than_a_collective_call(rank: int) -> None:
    assert WORK > LIMIT
    done = run(2, str(rank), "works", program=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("goes on") == 2


def test_a_process_may_end_right_after_a_collective_call() -> None:
    """Every thread has its turn in the end, on one processor and with a lock that nobody yields."""
    done = run(2, program=("-m", "tests.training.support.last_call"))
    assert done.returncode == 0, done.stderr


def test_a_rank_that_dies_while_it_copies_ends_the_others() -> None:
    since = time.monotonic()
    done = run(2, "1", "dies", program=PROGRAM)
    assert done.returncode != 0 and "goes on" not in done.stdout
    assert time.monotonic() - since < 300
