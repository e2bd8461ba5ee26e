"""A step of equally many sequences, whatever the number of ranks: `global_batch`."""

from typing import Any

import pytest

from training.config.config import Config
from training.config.flags import assemble
from training.config.global_batch import (
    RANKS,
    accumulate,
    ranks_at_start,
    share_out,
    smaller_batches,
    why_not_on,
)
from training.errors import RequestError
from training.models import Mamba2Config


def config(**changes: Any) -> Config:
    model = {"name": "small", "sizes": Mamba2Config(d_model=128, n_layer=2)}
    needed = {"dataset_path": "synthetic:", "save_ckpt_path": "/none"}
    return assemble({**needed, "batch_size": 1, **changes}, model)


@pytest.mark.parametrize(("readers", "batches"), [(4, 256), (16, 64), (1024, 1)])
def test_a_step_has_as_many_sequences_on_any_number_of_ranks(readers: int, batches: int) -> None:
    made = accumulate(config(global_batch=1024), readers)
    assert made.data.gradient_accumulation == batches
    assert accumulate(made, readers) == made  # a run's written configuration has both


def test_without_it_nothing_changes() -> None:
    given = config(gradient_accumulation=3)
    assert accumulate(given, 4) == given
    asked = config(global_batch=1024)
    assert accumulate(asked, 0) == asked, "fewer ranks than a group takes are reported elsewhere"


@pytest.mark.parametrize(
    ("total", "readers", "nearest"), [(1024, 12, "1,020 or 1,032"), (1024, 2048, "2,048")]
)
def test_one_that_does_not_divide_names_the_nearest(total: int, readers: int, nearest: str) -> None:
    with pytest.raises(
        RequestError, match=rf"global_batch: 1,024 .*fix: give the nearest, {nearest}$"
    ):
        accumulate(config(global_batch=total), readers)


def test_another_accumulation_is_refused() -> None:
    with pytest.raises(RequestError, match=r"gradient_accumulation: is 3, but .* needs 4 here"):
        accumulate(config(global_batch=16, gradient_accumulation=3), 4)


@pytest.mark.parametrize(
    ("sequences", "readers", "most", "batches"),
    [
        (128, 8, 4, (4, 4)),
        (6, 2, 2, (1, 3)),  # three in batches of two would take four
        (128, 56, 2, (1, 3)),
        (4096, 1016, 4, (1, 5)),
        (4, 7, 4, (1, 1)),
        (64, 7, 8, (5, 2)),
    ],
)
def test_fewer_ranks_take_more_batches(
    sequences: int, readers: int, most: int, batches: tuple[int, int]
) -> None:
    assert smaller_batches(sequences, readers, most) == batches
    size, number = batches
    assert size <= most and size * number * readers >= sequences


def test_a_step_keeps_its_sequences_on_fewer_ranks() -> None:
    given = config(batch_size=4, gradient_accumulation=2)
    shared = share_out(given, 3, 2).data
    assert (shared.global_batch, shared.batch_size, shared.gradient_accumulation) == (24, 4, 3)
    assert share_out(given, 3, 3) == given


def test_an_evaluation_takes_no_less_on_fewer_ranks() -> None:
    model = {"name": "small", "sizes": Mamba2Config(d_model=128, n_layer=2)}
    needed = {"dataset_path": "synthetic:", "save_ckpt_path": "/none"}
    held_out = {"eval_dataset_path": "synthetic:", "eval_batches": 5}
    data = share_out(assemble({**needed, **held_out, "batch_size": 2}, model), 3, 2).data
    assert (data.batch_size, data.eval_batch_size, data.eval_batches) == (1, 2, 8)


@pytest.mark.parametrize(
    ("changes", "ranks", "shown"),
    [
        ({}, 14, ""),
        ({"tensor_parallel": 4}, 14, "tensor_parallel: 14 ranks cannot be cut into groups of 4"),
        ({"context_parallel": 4}, 14, "context_parallel: 14 ranks cannot be cut into groups of 4"),
        (
            {"sharding_strategy": "hsdp", "shard_group_size": 4},
            14,
            "shard_group_size: 14 ranks cannot be cut into groups of 4",
        ),
        ({"sharding_strategy": "hsdp", "shard_group_size": 7}, 14, ""),
        ({"cpu_offload": True}, 14, "cpu_offload: several batches per step need fsdp_engine=fsdp2"),
        ({"cpu_offload": True, "fsdp_engine": "fsdp2"}, 14, ""),
    ],
)
def test_which_degrees_go_on_with_fewer_ranks(
    changes: dict[str, Any], ranks: int, shown: str
) -> None:
    said = why_not_on(config(**changes), ranks)
    assert said.startswith(shown) and bool(said) == bool(shown)


def test_the_ranks_that_a_job_has_begun_with() -> None:
    for environ in ({}, {RANKS: ""}, {RANKS: "4"}):
        assert ranks_at_start(4, environ) == 4
    assert ranks_at_start(4, {RANKS: "6"}) == 6


@pytest.mark.parametrize("wrong", ["x", "0", "-8", "1.5", "3"])
def test_ranks_that_no_job_has_begun_with(wrong: str) -> None:
    with pytest.raises(RequestError) as error:
        ranks_at_start(4, {RANKS: wrong})
    assert str(error.value) == (
        f"RANKS_AT_START: must be the number of ranks that the job began with, at least the 4 of "
        f"now, not {wrong!r}; fix: leave it out, as launchers set it"
    )
