"""Options that several commands share, and helpers for them."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sqshforge import platforms
from sqshforge.cli import completion
from sqshforge.errors import RequestError
from sqshforge.run.pairs import parse_pairs

if TYPE_CHECKING:
    from sqshforge.cli.workflow import Steps

DAY = 86400  # seconds


class Seconds(click.FloatRange):
    """A finite number of seconds, from `least` to `most`; by default at most a day."""

    def __init__(self, least: float, most: float | None = DAY) -> None:
        super().__init__(min=least, max=most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):  # nan passes every check of a range
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return number


engine_option = click.option(
    "--engine",
    envvar="ENGINE",
    default=None,
    shell_complete=completion.engines,
    metavar="NAME",
    help="docker or buildah [default: docker if a daemon answers, else buildah].",
)

set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a parameter of the recipe.",
)


platform_option = click.option(
    "--platform",
    type=click.Choice(tuple(platforms.ALL)),
    help="The platform of the image [default: this machine's, else the recipe's first].",
)


def steps_of(
    engine: str | None, settings: tuple[str, ...] = (), platform: str | None = None
) -> Steps:
    """Return the steps of this checkout, with the options that a command was given."""
    from sqshforge import project
    from sqshforge.cli.workflow import Steps
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter

    parameters = parse_pairs(settings, "--set")
    home = project.find()
    home.require_writable()
    return Steps(home, engine, Programs(), Reporter(), parameters, platform)


def following(
    checkout: Path,
    goal: str,
    target: str,
    platform: str | None,
    settings: tuple[str, ...] = (),
    engine: str | None = None,
    *,
    offline: bool = False,
) -> str:
    """Return the command that continues with the same image and engine, with make's `goal`.

    make's SET is split at blanks and read by make and a shell. If a setting would not survive that,
    the command is sqshforge's own.
    """
    from sqshforge.host import suggest

    if all(shlex.quote(one) == one for one in settings):
        given = {"TARGET": target, "OFFLINE": "1" if offline else ""}
        given |= {"SET": " ".join(settings), "PLATFORM": platform or "", "ENGINE": engine or ""}
        return suggest.make(checkout, goal, **{name: one for name, one in given.items() if one})
    words = [word for one in settings for word in ("--set", one)]
    words += ["--platform", platform] if platform else []
    words += ["--engine", engine] if engine else []
    command = suggest.sqshforge({"image": "build", "sqsh": "pack"}[goal], target, *words)
    return f"OFFLINE=1 {command}" if offline else command


def refuse_settings(settings: tuple[str, ...], platform: str | None, subject: str) -> None:
    """Raise `RequestError` if --set or --platform is given for something already built."""
    given = [f"--set {one}" for one in settings] + ([f"--platform {platform}"] if platform else [])
    if given:
        raise RequestError(
            f"{given[0]} is for a target, which is built with it; this is built already",
            where=subject,
            fix=f"leave {given[0].partition(' ')[0]} out, or name a target",
        )
