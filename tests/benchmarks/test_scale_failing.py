"""The goodput of a job whose nodes fail: formulas beside the simulation."""

from __future__ import annotations

from math import exp, expm1

import numpy as np
import pytest

from benchmarks.scale import failing
from benchmarks.scale.failing import Job
from training.checkpoint.interval import daly

WAITING = Job(mtbf=5000, stall=60, writing=0, restart=300)
BACKGROUND = Job(mtbf=5000, stall=2, writing=60, restart=300)


def test_formulas_of_young_and_daly() -> None:
    assert failing.young(50, 100 * 50 / 2) == pytest.approx(500)
    # d / 2M = 0.01: 500 (1 + 0.1 / 3 + 0.01 / 9) - 50
    assert daly(50, 2500) == pytest.approx(500 * (1 + 0.1 / 3 + 0.01 / 9) - 50)
    assert daly(200, 100) == 100
    assert daly(1e-6, 1e6) == pytest.approx(failing.young(1e-6, 1e6), rel=1e-5)


def test_without_writing_it_is_dalys_time() -> None:
    work, job = 700.0, WAITING
    time = job.mtbf * exp(job.restart / job.mtbf) * expm1((work + job.stall) / job.mtbf) / work
    assert failing.goodput(job, work) == pytest.approx(1 / time)


@pytest.mark.parametrize(
    ("job", "work"),
    [
        (WAITING, 200.0),
        (WAITING, 750.0),
        (WAITING, 4000.0),
        (BACKGROUND, 140.0),
        (BACKGROUND, 1000.0),
        (BACKGROUND, 20.0),  # less than a save takes to write
    ],
)
def test_simulated_goodput_is_the_formulas(job: Job, work: float) -> None:
    simulated = failing.simulate(job, work, 50_000, np.random.default_rng(7))
    assert 1 - simulated == pytest.approx(1 - failing.goodput(job, work), rel=0.03)


def test_simulated_goodput_of_two_kinds_of_failures() -> None:
    """Some are restarted in place, some take a requeue; and more in place is better."""
    kinds = [(0.4, 60.0), (0.6, 900.0)]
    simulated = failing.simulate(WAITING, 750.0, 50_000, np.random.default_rng(7), kinds)
    assert 1 - simulated == pytest.approx(
        1 - failing.goodput_of_kinds(WAITING, 750.0, kinds), rel=0.03
    )
    more = failing.goodput_of_kinds(WAITING, 750.0, [(0.5, 60.0), (0.5, 900.0)])
    assert more > failing.goodput_of_kinds(WAITING, 750.0, kinds)


@pytest.mark.parametrize(("stall", "dalys", "youngs"), [(5, 0.002, 0.02), (50, 0.02, 0.08)])
def test_the_best_interval_is_dalys(stall: float, dalys: float, youngs: float) -> None:
    """Within these parts of it; and nothing is lost beside what the simulation finds best."""
    job = Job(mtbf=5000, stall=stall, writing=0, restart=0)
    works = np.geomspace(20, 5000, 4001)
    best = float(works[np.argmax([failing.goodput(job, work) for work in works])])
    assert daly(stall, job.mtbf) == pytest.approx(best, rel=dalys)
    assert failing.young(stall, job.mtbf) == pytest.approx(best, rel=youngs)
    assert failing.young(stall, job.mtbf) > daly(stall, job.mtbf)

    tried = [best * factor for factor in (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.5)]
    found = [failing.simulate(job, work, 50_000, np.random.default_rng(7)) for work in tried]
    kept = failing.simulate(job, daly(stall, job.mtbf), 50_000, np.random.default_rng(7))
    assert kept > max(found) - 0.002
    # The top of a parabola through what was simulated.
    curve = np.polyfit(np.log(tried), found, 2)
    assert float(np.exp(-curve[1] / (2 * curve[0]))) == pytest.approx(best, rel=0.15)


def test_writing_in_the_background_keeps_the_interval() -> None:
    works = np.geomspace(61, 2000, 2001)
    best = works[np.argmax([failing.goodput(BACKGROUND, work) for work in works])]
    assert failing.interval(BACKGROUND) == pytest.approx(best, rel=0.01)
    slow = Job(mtbf=5000, stall=2, writing=500, restart=0)
    assert failing.interval(slow) == 500
    assert failing.goodput(slow, 500) > failing.goodput(slow, 250)
