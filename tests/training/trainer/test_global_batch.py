"""A step of as many sequences whatever the ranks are: `global_batch`."""

import pytest

from training.config.config import Config
from training.config.flags import assemble
from training.errors import RequestError
from training.models import Mamba2Config
from training.trainer.run import accumulate


def config(**changes: int) -> Config:
    model = {"name": "small", "sizes": Mamba2Config(d_model=128, n_layer=2)}
    needed = {"dataset_path": "synthetic:", "save_ckpt_path": "/none"}
    return assemble({**needed, "batch_size": 1, **changes}, model)


@pytest.mark.parametrize(("readers", "batches"), [(4, 256), (16, 64), (1024, 1)])
def test_a_step_has_as_many_sequences_on_any_number_of_ranks(readers: int, batches: int) -> None:
    made = accumulate(config(global_batch=1024), readers)
    assert made.data.gradient_accumulation == batches
    assert accumulate(made, readers) == made  # as a run's written configuration has both


def test_without_it_nothing_changes() -> None:
    given = config(gradient_accumulation=3)
    assert accumulate(given, 4) == given


@pytest.mark.parametrize(
    ("total", "readers", "nearest"), [(1024, 12, "1,020 or 1,032"), (1024, 2048, "2,048")]
)
def test_one_that_does_not_divide_names_the_nearest(total: int, readers: int, nearest: str) -> None:
    with pytest.raises(RequestError, match=rf"global_batch: 1,024 .*the nearest is {nearest}$"):
        accumulate(config(global_batch=total), readers)


def test_another_accumulation_is_refused() -> None:
    with pytest.raises(RequestError, match=r"gradient_accumulation: 3 .* takes 4 here"):
        accumulate(config(global_batch=16, gradient_accumulation=3), 4)
