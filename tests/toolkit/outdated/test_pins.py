"""How a pin is judged, counted and shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sqshforge.errors import MissingError
from sqshforge.outdated.names import Offer
from sqshforge.outdated.pins import (
    Pin,
    candidate,
    counts,
    is_other_build,
    judged,
    require_answers,
    table,
)

NUMPY = Pin(target="one", kind="package", name="numpy", pinned="1.26.4")
OFFERS = (Offer("2.2.6"), Offer("2.5.5", "3.12"))
SILENT = Pin(target="one", kind="source", name="nccl", pinned="v1", silent="no answer")
CURRENT = replace(NUMPY, name="pip", newest="1.26.4", fits="1.26.4")


def test_a_version_for_another_python_is_the_newest_and_no_candidate() -> None:
    pin = judged(NUMPY, OFFERS, "3.10")
    assert (pin.newest, pin.state) == ("2.5.5", "outdated")
    assert pin.held_by == ("2.5.5 needs Python 3.12, and the recipe has 3.10",)
    assert candidate(pin, OFFERS) == "2.2.6"


@pytest.mark.parametrize("offered", ["1.26.4", "1.25.0", "1.26.4rc1"])
def test_what_is_not_above_the_pin_is_not_newer(offered: str) -> None:
    pin = judged(NUMPY, [Offer(offered)], "3.10")
    assert (pin.newest, pin.fits, pin.state) == ("1.26.4", "1.26.4", "newest")
    assert candidate(pin, [Offer(offered)]) is None


def test_a_pin_above_all_that_the_index_has_says_so() -> None:
    """As with a mirror that is behind, or a version that was withdrawn."""
    pin = judged(NUMPY, [Offer("1.25.0")], "3.10")
    assert pin.held_by == ("the index has nothing newer than 1.25.0",)
    built = judged(replace(NUMPY, pinned="1.26.4+cpu"), [Offer("1.26.4")], "3.10")
    assert (built.state, built.held_by) == ("newest", ())


def test_what_no_index_has_is_not_asked() -> None:
    assert judged(NUMPY, [], "3.10").state == "not asked"


def test_a_build_of_its_own_is_compared_with_that_build_alone() -> None:
    assert is_other_build("2.13.0+cpu", "2.15.0")
    assert is_other_build("2.13.0+cpu", "2.15.0+cu130")
    assert not is_other_build("2.13.0+cpu", "2.15.0+cpu")
    assert not is_other_build("2.13.0", "2.15.0+cpu")


def test_a_moved_tag_is_newer_though_its_name_is_the_same() -> None:
    pin = Pin(target="one", kind="image", name="base", pinned="1", newest="1", moved="it moved")
    assert pin.state == "outdated"
    assert pin.remarks() == "it moved"


def test_remarks_have_the_reasons_before_the_recipes_words() -> None:
    pin = replace(judged(NUMPY, OFFERS, "3.10"), comment="for NumPy 1")
    assert pin.remarks().endswith("and the recipe has 3.10; # for NumPy 1")


def test_counts_are_in_one_line() -> None:
    pins = [judged(NUMPY, OFFERS, "3.10"), SILENT, CURRENT, CURRENT]
    assert counts(pins) == "4 pins: 2 newest, 1 outdated, 1 not asked"


def test_the_table_leaves_out_what_is_newest_and_joins_targets_that_agree() -> None:
    pin = judged(NUMPY, OFFERS, "3.10")
    drawn = table([pin, CURRENT, replace(pin, target="two"), replace(pin, target="b", fits="1")])
    rows = list(zip(*(column.cells for column in drawn.columns), strict=True))
    assert [(row[0], row[2], row[-1]) for row in rows] == [
        ("numpy", "?", "one, two"),
        ("numpy", "1", "b"),
    ]
    assert len(table([pin, SILENT]).columns) == 5


def test_only_complete_silence_is_an_error() -> None:
    require_answers([])
    require_answers([SILENT, CURRENT])
    with pytest.raises(MissingError, match="no source of versions answered") as caught:
        require_answers([SILENT, SILENT])
    assert caught.value.what.count("no answer") == 1
