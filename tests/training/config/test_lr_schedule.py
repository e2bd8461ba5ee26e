"""Each schedule follows its system's formula, at the edges too; errors are reported together."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from tests.training.support.runs import ROOT
from training.config.lr_schedule import (
    TAKES,
    ScheduleConfig,
    check,
    duration,
    learning_rate,
    tokens,
    warnings,
)
from training.errors import RequestError

PEAK = 3e-4
STYLES = ("cosine", "linear", "constant", "exponential", "plateau")


def rates(
    num_steps: int, tokens_per_step: int = 1, peak: float = PEAK, **given: Any
) -> list[float]:
    """Return the rates of all steps of a run."""
    config = ScheduleConfig(**given)
    check(config, num_steps, peak, tokens_per_step)
    return [
        learning_rate(config, step, num_steps, peak, tokens_per_step)
        for step in range(1, num_steps + 1)
    ]


@pytest.mark.parametrize(
    "times",
    [
        {"t_warmup": "40tok", "t_decay": "50tok", "t_max": "200tok"},
        {"t_warmup": "40tok", "t_decay": "50tok", "t_max": "1dur"},
        {"t_warmup": "4ba", "t_decay": "0.25dur", "t_max": "200tok"},
        {"t_warmup": "4ba", "t_decay": "5ba", "t_max": "20ba"},
    ],
)
def test_tokens_seen_change_nothing_where_each_step_has_had_as_many(times: Any) -> None:
    config = ScheduleConfig(name="wsd", **times)
    for step in range(1, 21):
        rate = learning_rate(config, step, 20, PEAK, 10)
        assert learning_rate(config, step, 20, PEAK, 10, 10 * (step - 1)) == rate


def test_of_durations_in_steps_and_in_tokens_each_counts_its_own() -> None:
    """Ten steps of 10 tokens, then steps of 40: it ends at step 20, as before."""
    config = ScheduleConfig(name="wsd", t_warmup="0tok", t_decay="80tok", t_max="20ba", alpha_f=0.0)
    found = [learning_rate(config, x, 20, 1.0, 40, 100 + 40 * (x - 11)) for x in range(11, 21)]
    assert found == [1.0] * 8 + [0.5, 0.0]


@pytest.mark.parametrize("num_steps", [1, 19, 20, 100, 1200, 41_000])
def test_quadratic_warm_up_and_cosine_to_a_tenth(num_steps: int) -> None:
    found = rates(num_steps, name="quadratic-cosine")
    warm = max(min(2000, num_steps // 20), 1)
    for x in {1, 2, warm, warm + 1, num_steps // 2, num_steps} & set(range(1, num_steps + 1)):
        rising = 1 - (1 - min(x, warm) / warm) ** 2
        falling = 0.1 + 0.5 * (1 - 0.1) * (1 + math.cos(x / num_steps * math.pi))
        assert found[x - 1] == pytest.approx(PEAK * min(rising, falling), rel=1e-12)
    assert found[-1] == pytest.approx(PEAK / 10)


def annealed(
    style: str, x: int, start: float, end: int, warmup: float, plateau: float, least: float
) -> float:
    """The Llama systems' AnnealingLR, as in llama-mixtral-fsdp."""
    w = warmup * end
    n = min(x, end - w)
    if w > 0 and x <= w:
        return start * n / w
    n -= w
    flat = w + plateau * end
    falls = {
        "linear": start * (end - n) / end,
        "cosine": start / 2.0 * (math.cos(math.pi * n / end) + 1),
        "exponential": start * math.exp(-0.693 * n / end),
        "constant": start,
        "plateau": start if x <= flat else start * (end - x) / (end - flat),
    }
    return max(falls[style], least)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", [0.0, 0.0032, 0.1, 0.5])
@pytest.mark.parametrize(("num_steps", "iters"), [(1, 0), (500, 0), (300, 4000), (300, 100)])
def test_the_five_styles_of_the_llama_systems(
    style: str, warmup: float, num_steps: int, iters: int
) -> None:
    more: dict[str, Any] = {"plateau": 0.25} if style == "plateau" else {}
    found = rates(num_steps, name=style, warmup=warmup, lr_decay_iters=iters, min_lr=1e-5, **more)
    wanted = [
        annealed(style, x, PEAK, iters or num_steps, warmup, more.get("plateau", 0.0), 1e-5)
        for x in range(1, num_steps + 1)
    ]
    assert found == pytest.approx(wanted, rel=1e-12)
    assert max(found) <= PEAK * (1 + 1e-12)


def test_the_rates_that_the_llama_system_logs() -> None:
    found = rates(5000, peak=1e-4, name="cosine")
    logged = ["0.000006", "0.000013", "0.000019", "0.000025", "0.000031", "0.000038"]
    assert [float(text) for text in logged] == pytest.approx(found[:6], abs=5.01e-7)
    assert found[15] == pytest.approx(1e-4)  # 16 = 0.0032 * 5000 steps of warm-up
    assert found[-1] == 1e-5


def test_where_the_styles_end() -> None:
    """Cosine and linear stop short of 0, like the system's own; plateau does not."""
    ends = {
        style: rates(1000, peak=1.0, name=style, warmup=0.1, min_lr=0.0)[-1] for style in STYLES
    }
    assert ends == pytest.approx(
        {
            "cosine": (1 + math.cos(0.8 * math.pi)) / 2,
            "linear": 0.2,
            "constant": 1.0,
            "exponential": math.exp(-0.693 * 0.8),
            "plateau": 0.0,
        }
    )


@pytest.mark.parametrize("t_max", ["10000tok", "1dur", "100ba"])
def test_warm_up_stable_decay(t_max: str) -> None:
    found = rates(
        110 if t_max != "1dur" else 100,
        tokens_per_step=100,
        name="wsd",
        t_warmup="1000tok",
        t_max=t_max,
        t_decay="20ba",
        alpha_f=0.1,
    )
    for step, rate in enumerate(found, 1):
        if step < 10:
            wanted = 1e-10 + step / 10 * (1.0 - 1e-10)
        elif step < 80:
            wanted = 1.0
        else:
            wanted = max(0.1, (20 - (step - 80)) / 20)
        assert rate == pytest.approx(PEAK * wanted, rel=1e-12), step
    assert found[9] == found[79] == PEAK and found[-1] == pytest.approx(PEAK / 10)


def test_the_shipped_settings_of_the_composer_system() -> None:
    per_step = 896 * 4096
    found = rates(
        2744,
        per_step,
        4.5e-4,
        name="wsd",
        t_warmup="1006878720tok",
        t_max="10068787200tok",
        t_decay="1006878720tok",
    )
    assert found[273] < 4.5e-4 == found[274] == found[2468]  # a tenth is 274.4 steps
    assert found[2470] < 4.5e-4
    assert found[-1] == pytest.approx(4.5e-5)


@pytest.mark.parametrize("warm", [0, 1, 30])
def test_cosine_in_tokens(warm: int) -> None:
    found = rates(
        120, 64, name="cosine-tokens", t_warmup=f"{warm * 64}tok", t_max="100ba", alpha_f=0.2
    )
    for step, rate in enumerate(found, 1):
        if step < warm:
            wanted = step / warm
        else:
            tau = min(1.0, (step - warm) / (100 - warm))
            wanted = 0.2 + (1 - 0.2) * 0.5 * (1 + math.cos(math.pi * tau))
        assert rate == pytest.approx(PEAK * wanted, rel=1e-12), step


@pytest.mark.parametrize(("num_steps", "warm"), [(1, 0), (1, 1), (50, 0), (50, 50), (400, 100)])
def test_cosine_to_zero(num_steps: int, warm: int) -> None:
    found = rates(num_steps, name="cosine-to-zero", warmup_steps=warm)
    for x, rate in enumerate(found, 1):
        along = (x - warm) / max(1, num_steps - warm)
        wanted = x / warm if x < warm else 0.5 * (1 + math.cos(math.pi * along))
        assert rate == pytest.approx(PEAK * wanted, abs=1e-18), x
    assert found[-1] == pytest.approx(PEAK if warm == num_steps else 0, abs=1e-18)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "cosine", "lr_decay_iters": 100_000, "warmup": 0.01},
        {"name": "wsd", "t_warmup": "1000ba", "t_max": "9000ba", "t_decay": "10ba"},
        {"name": "cosine-tokens", "t_warmup": "1000ba", "t_max": "9000ba"},
        {"name": "cosine-to-zero", "warmup_steps": 1000},
    ],
)
def test_a_warm_up_longer_than_the_run_only_rises(given: dict[str, Any]) -> None:
    found = rates(50, 7, **given)
    wanted = [PEAK * step / 1000 for step in range(1, 51)]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_rate_that_never_falls_is_reported() -> None:
    config = ScheduleConfig(name="cosine-to-zero")
    assert warnings(config, 1000) == [
        "warmup_steps: 2000 are not less than the 1000 of num_steps; the learning rate only rises, "
        "to 50% of its peak"
    ]
    assert warnings(config, 2001) == warnings(ScheduleConfig(name="wsd"), 10) == []


@pytest.mark.parametrize("name", TAKES)
def test_no_schedule_leaves_its_range(name: str) -> None:
    for num_steps in (1, 2, 3, 10, 77):
        found = rates(num_steps, 50, name=name)
        assert all(0 <= rate <= PEAK for rate in found)


@pytest.mark.parametrize(
    ("text", "read", "in_tokens"),
    [
        ("1006878720tok", (1006878720, "tok"), 1006878720),
        ("100ba", (100, "ba"), 3200),
        ("0.25dur", (0.25, "dur"), 800),
        ("1e3TOK", (1000, "tok"), 1000),
        (".5dur", (0.5, "dur"), 1600),
        ("0ba", (0, "ba"), 0),
    ],
)
def test_durations(text: str, read: tuple[float, str], in_tokens: int) -> None:
    assert duration(text) == read
    assert tokens(text, 100, 32) == in_tokens


@pytest.mark.parametrize("text", ["", "100", "-1tok", "1 tok", "2ep", "5sp", "tok", "1e999tok"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="t_max: must be a number of tokens, steps or a share"):
        ScheduleConfig(name="wsd", t_max=text)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        ScheduleConfig(
            name="plateau", min_lr=-1.0, warmup=0.6, plateau=0.5, alpha_f=0.5, lr_decay_iters=-3
        )
    assert str(caught.value).splitlines() == [
        "5 faults",
        "  - alpha_f: schedule=plateau does not take it; these do: wsd, cosine-tokens",
        "  - min_lr: must be at least 0, not -1.0",
        "  - warmup: must be at least 0 and at most 0.5, not 0.6; "
        "fix: give a share, such as 0.1 for a tenth",
        "  - lr_decay_iters: must not be negative, but is -3",
        "  - plateau: warmup and plateau must leave a part of the run for the rate to fall",
    ]
    with pytest.raises(RequestError, match="schedule: must be one of quadratic-cosine, cosine, "):
        ScheduleConfig(name="polynomial")
    for bad in (math.nan, math.inf):
        with pytest.raises(RequestError, match="min_lr: must be at least 0, not"):
            ScheduleConfig(name="cosine", min_lr=bad)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"name": "linear", "min_lr": 1e-3}, "min_lr: must be at most learning_rate, 0.0003, not"),
        ({"name": "wsd", "t_warmup": "95ba"}, "t_max: its 1,000 tokens must hold t_warmup and "),
        ({"name": "wsd", "t_decay": "0tok"}, "t_decay: must be at least one token"),
        ({"name": "cosine-tokens", "t_warmup": "1dur"}, "t_max: must be more than t_warmup; they"),
    ],
)
def test_what_does_not_fit_the_run(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(RequestError, match=fault):
        check(ScheduleConfig(**given), 100, PEAK, 10)


def test_settings_come_back_from_what_config_json_holds() -> None:
    config = ScheduleConfig(name="wsd", t_warmup="5ba")
    assert ScheduleConfig(**dataclasses.asdict(config)) == config


@pytest.mark.processes
def test_schedules_are_light() -> None:
    code = "import sys, training.config.lr_schedule; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
