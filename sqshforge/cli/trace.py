"""The command that lists the files of an image that a start reads: trace."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sqshforge.cli import completion
from sqshforge.cli.options import engine_option, platform_option, refuse_settings, steps_of
from sqshforge.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqshforge.hot import HotList

ENOUGH = 0.9  # share of a list's lines that must name a file, else it is to be written anew


@click.command()
@click.argument("subject", metavar="TARGET|FILE.sqsh", shell_complete=completion.targets_or_files)
@click.option(
    "--list",
    "place",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The list to write, or to check "
    "[default: recipes/hot/TARGET.txt; for FILE.sqsh, standard output].",
)
@click.option(
    "--check", is_flag=True, help="Start nothing; check that the image has the list's files."
)
@platform_option
@engine_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def trace(
    subject: str,
    place: Path | None,
    check: bool,
    platform: str | None,
    engine: str | None,
    command: tuple[str, ...],
) -> None:
    """List the files that a start reads, in order of first use, for pack to pack first.

    A start is COMMAND (after --); by default two steps of the smoke test's training in the image's
    recipe, or else its imports. Files above 32 MiB of which less than a tenth is read are left out.
    """
    from sqshforge.host import files, suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter, human, show_lines
    from sqshforge.hot import NONE, HotList
    from sqshforge.image.enroot import CARRIED
    from sqshforge.run import trace as tracing
    from sqshforge.squash import pack as squash
    from sqshforge.squash.cache import Cache

    if check and command:
        raise RequestError("--check takes no command", fix="leave the command out, or --check")
    target = default = None
    if "/" in subject or subject.endswith(".sqsh"):
        image = Path(subject)
        refuse_settings((), platform, subject)
    else:
        target, steps = subject, steps_of(engine, platform=platform)
        default = steps.project.hot_list(steps.name(target))
        place = place or default
    if check and place is None:
        raise RequestError("which list is to be checked?", fix="add --list FILE")
    listed = HotList.read(place) if check and place else NONE  # before a build, which takes long
    again: list[str | Path] = ["trace", subject]
    again += ["--list", place] if place and place != default else []
    again += ["--platform", platform] if platform else []
    if check and not listed.lines:
        fix = f"write it: {suggest.sqshforge(*again)}"
        raise RequestError("the list names no file", where=str(place), fix=fix)
    if target is not None:
        options = squash.Options.of("shared", keep=True, hot=steps.hot(target))
        output = steps.sqsh(target)
        image = steps.pack(steps.build(target), output, options, Cache.of_user()).path
    if check and place:
        _check(listed, place, image, again)
        return
    words = command or tracing.default_command(image)
    found = tracing.trace(image, words, Programs(), Reporter())
    paths = (os.fsdecode(path) for path in found.hot(tracing.sizes(image)))
    hot = HotList.of(path for path in paths if not path.startswith(f"{CARRIED}/"))
    text = hot.text(
        "Files that a start reads, the first used first: sqshforge trace writes this list."
    )
    if place is None:
        sys.stdout.buffer.write(text)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and not place.is_file():  # /dev/stdout, which no file is to replace
        place.write_bytes(text)
    else:
        files.publish(text, place.resolve())
    show_lines(f"{place}: {len(hot.lines)} lines, {human(found.size)} read")
    if target is None:
        following = suggest.sqshforge("trace", image, "--list", place, "--check")
    else:
        other: list[str | Path] = [] if place == default else ["--hot", place]
        other += ["--platform", platform] if platform else []
        following = suggest.sqshforge("pack", target, *other)
    show_lines(f"next: {following}")


def _check(hot: HotList, place: Path, image: Path, again: Sequence[str | Path]) -> None:
    """Print how many lines name a file of an image; exit with 1 if they are too few.

    `again` is the trace command that writes the list anew.
    """
    from sqshforge.host import suggest
    from sqshforge.host.terminal import show_lines
    from sqshforge.squashfs.image import open_image
    from sqshforge.squashfs.inode import FILE

    with open_image(image) as opened:
        files = [path for path, entry in opened.entries.items() if entry.kind == FILE]
    missing = hot.missing(files)
    there = len(hot.lines) - len(missing)
    show_lines(*(f"names nothing: {line}" for line in missing))
    show_lines(f"{place}: {there} of {len(hot.lines)} lines name a file of {image}")
    enough = there >= ENOUGH * len(hot.lines)
    following = ("inspect", image) if enough else again
    show_lines(f"next: {suggest.sqshforge(*following)}")
    if not enough:
        sys.exit(1)


COMMANDS = (trace,)
