"""Learning-rate schedules: the rate of step 1, 2, ... num_steps as a function of the step alone.

With durations in tokens, it also depends on the tokens seen, which a checkpoint records. Nothing
else is remembered between steps, so a resumed run continues exactly. The formulas are those of the
systems whose users come here, with their quirks; docs/training/schedules.md plots them and states
which system each is from.

Glossary: x is the step, N the number of steps that a schedule covers, W its warm-up in steps; t is
the number of tokens, those of the step included. The systems themselves count one step less: their
first step has the rate of x = 0, which is 0 with a warm-up, and their last that of x = N - 1. No
torch here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from training.config.setting import setting
from training.errors import RequestError

_ANNEALING = ("min_lr", "lr_decay_iters", "warmup")
TAKES: dict[str, tuple[str, ...]] = {
    "quadratic-cosine": (),
    "cosine": _ANNEALING,
    "linear": _ANNEALING,
    "constant": _ANNEALING,
    "exponential": _ANNEALING,
    "plateau": (*_ANNEALING, "plateau"),
    "wsd": ("t_warmup", "t_max", "t_decay", "alpha_f"),
    "cosine-tokens": ("t_warmup", "t_max", "alpha_f"),
    "cosine-to-zero": ("warmup_steps",),
}
"""The settings that each schedule takes."""

_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?(tok|ba|dur)", re.IGNORECASE)
_DURATIONS = ("t_warmup", "t_max", "t_decay")
_TOKENS = "tok"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which schedule, and its settings. Raises RequestError with all its faults when it is made.

    A setting that the schedule does not take must be left at its default.
    """

    name: str = "quadratic-cosine"
    # cosine, linear, constant, exponential, plateau
    min_lr: float = setting(1e-5, "rate that it never falls below")
    lr_decay_iters: int = setting(0, "steps over which the rate falls; 0: those of the run")
    warmup: float = setting(0.0032, "share of the steps in which the rate rises")
    plateau: float = setting(0.0, "share of the steps in which it stays before it falls")
    # wsd, cosine-tokens: durations as Composer has them, such as 1006878720tok, 100ba, 0.1dur
    t_warmup: str = setting("0.1dur", "until when it rises, such as 1006878720tok, 100ba or 0.1dur")
    t_max: str = setting("1dur", "when it is at its end")
    t_decay: str = setting("0.1dur", "how long it falls before that")
    alpha_f: float = setting(0.1, "share of the peak that is left at the end")
    # cosine-to-zero
    warmup_steps: int = setting(2000, "steps in which it rises")

    def __post_init__(self) -> None:
        found = _faults(self)
        if found:
            raise RequestError.of(found)


def check(config: ScheduleConfig, num_steps: int, peak: float, tokens_per_step: int) -> None:
    """Check a schedule against its run. Raises RequestError with all faults."""
    found = []
    takes = TAKES[config.name]
    if "min_lr" in takes and config.min_lr > peak:
        found.append(f"min_lr: must be at most learning_rate, {peak:g}, not {config.min_lr:g}")
    if "t_max" in takes:
        t = {n: tokens(getattr(config, n), num_steps, tokens_per_step) for n in _DURATIONS}
        if config.name == "wsd" and t["t_warmup"] + t["t_decay"] > t["t_max"]:
            found.append(
                f"t_max: its {t['t_max']:,} tokens must hold t_warmup and t_decay, which are "
                f"{t['t_warmup']:,} and {t['t_decay']:,}"
            )
        if config.name == "wsd" and t["t_decay"] == 0:
            found.append("t_decay: must be at least one token")
        if config.name == "cosine-tokens" and t["t_warmup"] >= t["t_max"]:
            found.append(
                f"t_max: must be more than t_warmup; they are {t['t_max']:,} and "
                f"{t['t_warmup']:,} tokens"
            )
    if found:
        raise RequestError.of(found)


def warnings(config: ScheduleConfig, num_steps: int) -> list[str]:
    """Return warnings of what may do for a first try but is rarely meant."""
    if config.name != "cosine-to-zero" or config.warmup_steps < num_steps:
        return []
    return [
        f"warmup_steps: {config.warmup_steps} are not less than the {num_steps} of num_steps; the "
        f"learning rate only rises, to {num_steps / config.warmup_steps:.0%} of its peak"
    ]


def learning_rate(
    config: ScheduleConfig,
    step: int,
    num_steps: int,
    peak: float,
    tokens_per_step: int,
    seen: int | None = None,
) -> float:
    """Return the learning rate of a step, counted from 1.

    `peak` is the rate after the warm-up, `tokens_per_step` the tokens of one step over all ranks,
    and `seen` those of all steps before (None if each had as many). What `check` refuses may divide
    by zero.
    """
    if config.name == "quadratic-cosine":
        return peak * _quadratic_cosine(step, num_steps)
    if config.name == "cosine-to-zero":
        return peak * _cosine_to_zero(step, num_steps, config.warmup_steps)
    if config.name in ("wsd", "cosine-tokens"):
        t = alike = step * tokens_per_step
        if seen is not None and any(_is_in_tokens(config, name) for name in TAKES[config.name]):
            t = seen + tokens_per_step
        return peak * share(config, t, num_steps, tokens_per_step, t - alike)
    return _annealing(config, step, config.lr_decay_iters or num_steps, peak)


def share(
    config: ScheduleConfig, t: int, num_steps: int, tokens_per_step: int, more: int = 0
) -> float:
    """Return the share of the peak after t tokens (with the step's), for wsd or cosine-tokens.

    more: how many more tokens t is than if each step had had tokens_per_step; a time that is given
    in steps, or as a share of the run, comes that much later.
    """
    warm, end, decay = (
        tokens(getattr(config, name), num_steps, tokens_per_step) for name in _DURATIONS
    )
    warm += 0 if _is_in_tokens(config, "t_warmup") else more
    end += 0 if _is_in_tokens(config, "t_max") else more
    if config.name == "wsd":
        return _warmup_stable_decay(t, warm, end, decay, config.alpha_f)
    return _cosine_tokens(t, warm, end, config.alpha_f)


def tokens(text: str, num_steps: int, tokens_per_step: int) -> int:
    """Return the tokens of a duration in tokens, in steps ("ba") or as a share of a run ("dur")."""
    value, unit = duration(text)
    if unit == _TOKENS:
        return int(value)
    if unit == "ba":
        return int(value) * tokens_per_step
    return int(value * num_steps * tokens_per_step)


def _is_in_tokens(config: ScheduleConfig, name: str) -> bool:
    return name in _DURATIONS and duration(getattr(config, name))[1] == _TOKENS


def duration(text: str) -> tuple[float, str]:
    """Read a duration's value and unit. Raises ValueError saying what it should be."""
    found = _DURATION.fullmatch(text)
    value = float(found[1] + (found[2] or "")) if found else math.inf
    if found is None or math.isinf(value):
        raise ValueError(
            "a number of tokens, steps or a share of the run, such as 1006878720tok, 100ba or "
            "0.1dur"
        )
    return value, found[3].lower()


def _faults(config: ScheduleConfig) -> list[str]:
    """List what is wrong with the settings, whatever run they are for."""
    if config.name not in TAKES:
        return [f"schedule: must be one of {', '.join(TAKES)}, not {config.name!r}"]
    found = []
    for field in dataclasses.fields(config):
        if field.name in ("name", *TAKES[config.name]):
            continue
        if getattr(config, field.name) != field.default:
            those = ", ".join(name for name, takes in TAKES.items() if field.name in takes)
            found.append(
                f"{field.name}: schedule={config.name} does not take it; these do: {those}"
            )
    # From W = N / 2 on, the annealing formula never reaches the peak, and then exceeds it.
    limits = {"min_lr": math.inf, "warmup": 0.5, "plateau": 1.0, "alpha_f": 1.0}
    for name, most in limits.items():
        value = getattr(config, name)
        if not (0 <= value <= most and math.isfinite(value)):
            is_share = math.isfinite(most)
            limit = f" and at most {most:g}" if is_share else ""
            fix = "; fix: give a share, such as 0.1 for a tenth" if is_share else ""
            found.append(f"{name}: must be at least 0{limit}, not {value}{fix}")
    found += [
        f"{name}: must not be negative, but is {getattr(config, name)}"
        for name in ("lr_decay_iters", "warmup_steps")
        if getattr(config, name) < 0
    ]
    if config.name == "plateau" and config.warmup + config.plateau >= 1:
        found.append(
            "plateau: warmup and plateau must leave a part of the run for the rate to fall"
        )
    for name in _DURATIONS:
        try:
            duration(getattr(config, name))
        except ValueError as error:
            found.append(f"{name}: must be {error}, not {getattr(config, name)!r}")
    return found


def _quadratic_cosine(x: int, num_steps: int) -> float:
    """The lesser of a quadratic warm-up over W steps and a cosine over all N steps to 0.1.

    W = min(2000, N // 20), at least 1.
    """
    warm = max(1, min(2000, num_steps // 20))
    rising = 1 - (1 - min(x, warm) / warm) ** 2
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * min(x, num_steps) / num_steps))
    return min(rising, falling)


def _cosine_to_zero(x: int, num_steps: int, warm: int) -> float:
    """Linear warm-up, then half a cosine that is 0 at the last step."""
    if x < warm:
        return x / warm
    progress = (x - warm) / max(1, num_steps - warm)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def _annealing(config: ScheduleConfig, x: int, end: int, peak: float) -> float:
    """Linear warm-up, then a fall in one of five styles, never below min_lr.

    Two quirks of the system are kept. n, the steps since the warm-up, is divided by N and not by
    N - W; and it no longer grows from x = N - W on. So cosine, linear and exponential stop short of
    their ends, the more so the longer the warm-up is. Only plateau gets to 0.
    """
    warm = config.warmup * end
    if warm > 0 and x <= warm:
        return peak * x / warm
    n = min(x, end - warm) - warm
    if config.name == "cosine":
        rate = peak / 2 * (math.cos(math.pi * n / end) + 1)
    elif config.name == "linear":
        rate = peak * (end - n) / end
    elif config.name == "exponential":
        rate = peak * math.exp(-0.693 * n / end)  # a half, if n came to N
    elif config.name == "plateau" and x > (flat := warm + config.plateau * end):
        rate = peak * (end - x) / (end - flat)
    else:
        rate = peak
    return max(rate, config.min_lr)


def _warmup_stable_decay(t: int, warm: int, end: int, decay: int, alpha_f: float) -> float:
    """Linear from 1e-10, then 1, then linear towards 0 at `end`, but never below alpha_f."""
    if t < warm:
        return 1e-10 + (1 - 1e-10) * t / warm
    if t < end - decay:
        return 1.0
    return max(alpha_f, (end - t) / decay)


def _cosine_tokens(t: int, warm: int, end: int, alpha_f: float) -> float:
    """Linear from 0, then half a cosine to alpha_f at `end`, where it stays."""
    if t < warm:
        return t / warm
    progress = min(1.0, (t - warm) / max(1, end - warm))
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * progress)) / 2
