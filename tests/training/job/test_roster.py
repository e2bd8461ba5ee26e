"""Which nodes train, wait or are gone, according to the list that node 0 keeps."""

from __future__ import annotations

from training.job.restart.roster import DONE, EMPTY, LEFT, SILENCE, Place, Roster


def beats(number: int, *silent: int, nodes: int = 4) -> list[str]:
    """Return signs of life of all nodes but some, which gave their last at time 1."""
    return ["1" if node in silent else str(number) for node in range(nodes)]


def test_the_first_nodes_train_and_the_others_wait() -> None:
    roster = Roster(4, 3)
    assert list(roster.places.values()) == [Place.TRAINS] * 3 + [Place.WAITS]
    assert roster.waiting() == []  # none has been heard
    roster.heard(["1", "1", "1", "1"], 1.0)
    assert roster.waiting() == [3] and roster.call() == 3
    assert roster.places[3] is Place.TRAINS and roster.call() is None


def test_a_node_that_has_failed_too_often_is_not_called() -> None:
    roster = Roster(4, 2, worn=[1])
    assert roster.places[1] is Place.OUT and roster.places[2] is Place.TRAINS
    roster.heard(beats(1), 1.0)
    assert roster.waiting() == [3]


def test_nodes_that_have_failed_train_where_there_are_no_others() -> None:
    """The first node always does, too."""
    roster = Roster(3, 2, worn=[0, 1, 2])
    assert [roster.places[node] for node in range(3)] == [Place.TRAINS, Place.TRAINS, Place.OUT]


def test_a_silent_node_is_lost_once() -> None:
    roster = Roster(4, 3)
    roster.heard(beats(1), 1.0)
    number, passed = 1, 0.0
    while passed + 1.0 <= SILENCE:
        number, passed = number + 1, passed + 1.0
        assert roster.heard(beats(number, 2), 1.0) == []
    assert roster.heard(beats(number + 1, 2), 1.0) == [2]
    roster.places[2] = Place.LOST
    assert roster.heard(beats(number + 2, 2), 100.0) == []


def test_a_node_that_has_not_come_yet_is_not_lost() -> None:
    roster = Roster(4, 3)
    for number in range(100):
        assert roster.heard(["", str(number), "", str(number)], 1.0) == []


def test_a_node_gives_its_place_away() -> None:
    roster = Roster(3, 2)
    roster.heard(beats(1, nodes=3), 1.0)
    assert roster.left(["1", LEFT, "1"]) == [1]
    roster.places[1] = Place.LEFT
    assert roster.left(["1", LEFT, "1"]) == [] and roster.heard(["2", LEFT, "2"], 99.0) == []


def test_a_place_that_nobody_takes() -> None:
    roster = Roster(3, 3)
    roster.heard(beats(1, nodes=3), 1.0)
    assert roster.left(["1", EMPTY, "1"]) == [1] and roster.training == 3
    roster.places[1] = Place.LEFT
    roster.shrink()
    assert roster.training == 2 and roster.heard(["2", EMPTY, "2"], 99.0) == []


def test_a_node_that_has_ended_is_not_lost() -> None:
    """The first may still save, or send its results, for long after the others."""
    roster = Roster(3, 2)
    roster.heard(beats(1, nodes=3), 1.0)
    assert roster.heard(["2", DONE, "2"], 1.0) == []
    assert roster.heard(["3", DONE, "3"], 100.0) == []
