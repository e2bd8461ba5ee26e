"""The commands that pack, test, start and stage squash files, and the cache of bases."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from sqshforge.cli import completion
from sqshforge.cli.group import Commands
from sqshforge.cli.options import (
    engine_option,
    platform_option,
    refuse_settings,
    set_option,
    steps_of,
)
from sqshforge.errors import RequestError


@click.command()
@click.argument("source", shell_complete=completion.targets)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.sqsh",
    help="The file to write [default: build/TARGET.sqsh].",
)
@click.option(
    "--profile",
    default="shared",
    shell_complete=completion.profiles,
    metavar="NAME",
    help="The compression profile: fast, shared or archive [default: shared].",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="The number of processors to use [default: those of this job].",
)
@click.option("--force", is_flag=True, help="Pack even if the file is up to date or not ours.")
@click.option("--xattrs", is_flag=True, help="Keep extended attributes and file capabilities.")
@click.option("--devices", is_flag=True, help="Keep device nodes outside /dev.")
@click.option(
    "--no-cache",
    is_flag=True,
    help="Read the whole image, and keep no base of it; add --force if the file is up to date.",
)
@click.option(
    "--hot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A list of the files to pack first [default: recipes/hot/TARGET.txt, if it exists].",
)
@click.option(
    "--no-hot",
    is_flag=True,
    help="Pack no files first; pack all in directory order.",
)
@set_option
@platform_option
@engine_option
def pack(
    source: str,
    output: Path | None,
    profile: str,
    jobs: int | None,
    force: bool,
    xattrs: bool,
    devices: bool,
    no_cache: bool,
    hot: Path | None,
    no_hot: bool,
    settings: tuple[str, ...],
    platform: str | None,
    engine: str | None,
) -> None:
    """Pack SOURCE as a squash file for enroot and pyxis.

    SOURCE is a target (built first if needed), dockerd://NAME[:TAG], buildah://NAME[:TAG],
    oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME:TAG], rootfs:DIR or
    docker://HOST/NAME[:TAG] (a registry, read through skopeo).
    """
    from dataclasses import replace

    from sqshforge.host import suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter, duration, human, show_lines
    from sqshforge.hot import NONE, HotList
    from sqshforge.image import address as sources
    from sqshforge.squash import pack as squash
    from sqshforge.squash.cache import Cache

    if hot is not None and (xattrs or no_hot):
        other = "--xattrs" if xattrs else "--no-hot"
        raise RequestError(
            f"--hot cannot be combined with {other}, which packs files in the order of their names",
            fix="leave one of the two out",
        )
    options = squash.Options.of(
        profile,
        jobs=jobs,
        force=force,
        xattrs=xattrs,
        devices=devices,
        hot=NONE if hot is None else HotList.read(hot),
    )
    cache = None if no_cache else Cache.of_user()
    if sources.is_address(source):
        if output is None:
            raise RequestError("pack needs an output for this source", fix="add -o FILE.sqsh")
        refuse_settings(settings, platform, source)
        packed = squash.pack_address(source, output, options, Programs(), Reporter(), cache)
    else:
        ours = steps_of(engine, settings, platform)
        place = output or ours.sqsh(source)
        if hot is None and not (no_hot or xattrs):
            options = replace(options, hot=ours.hot(source))
        packed = ours.pack(ours.build(source), place, options, cache)
    state = "up to date" if packed.up_to_date else f"packed in {duration(packed.seconds)}"
    show_lines(
        f"{packed.path}: {state}, {human(packed.size)}",
        f"next: {suggest.sqshforge('smoke-test', suggest.sqsh(packed.path))}",
    )


@click.command("smoke-test")
@click.argument("subject", metavar="TARGET|FILE.sqsh", shell_complete=completion.targets_or_files)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@set_option
@platform_option
@engine_option
def smoke_test(
    subject: str,
    as_json: bool,
    settings: tuple[str, ...],
    platform: str | None,
    engine: str | None,
) -> NoReturn:
    """Check, inside an image, that its packages load and that training works."""
    import json
    from dataclasses import asdict

    from sqshforge.cli import workflow
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter, show_lines, show_table
    from sqshforge.run import smoke_test as smoke
    from sqshforge.squash import pack as squash
    from sqshforge.squash.cache import Cache

    if "/" in subject or subject.endswith(".sqsh"):
        image = Path(subject)
        refuse_settings(settings, platform, subject)
        outcome = smoke.run(image, Programs(), Reporter())
    else:
        steps = steps_of(engine, settings, platform)
        place = steps.sqsh(subject)
        options = squash.Options.of("shared", keep=True, hot=steps.hot(subject))
        packed = steps.pack(steps.build(subject), place, options, Cache.of_user())
        image, outcome = packed.path, steps.test(packed)
    if as_json:
        click.echo(json.dumps(asdict(outcome), indent=2))
    else:
        show_table(outcome.table())
        show_lines("", f"{image}: {'passed' if outcome.ok else 'FAILED'}")
        if outcome.ok:
            show_lines(f"next: {workflow.launch_command(image, Programs())}")
    sys.exit(0 if outcome.ok else 1)


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("image", type=click.Path(path_type=Path), metavar="FILE.sqsh")
@click.option(
    "--mount", "mounts", multiple=True, metavar="SRC:DST", help="Mount the host's SRC at DST."
)
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set an environment variable."
)
@click.option(
    "--runtime",
    type=click.Choice(("auto", "enroot", "builtin")),
    default="auto",
    help="What starts it; auto: enroot if it is installed, else builtin [default: auto].",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    image: Path,
    mounts: tuple[str, ...],
    variables: tuple[str, ...],
    runtime: str,
    command: tuple[str, ...],
) -> NoReturn:
    """Start a squash file, run COMMAND (after --) in it, and exit with its code."""
    from sqshforge.host.programs import Programs
    from sqshforge.run import start
    from sqshforge.run.mounts import Mount
    from sqshforge.run.pairs import parse_pairs

    start.run(
        image,
        command,
        mounts=[Mount.parse(one) for one in mounts],
        environment=parse_pairs(variables, "--env"),
        runtime=runtime,
        programs=Programs(),
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.sqsh")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--limit",
    envvar="STAGE_LIMIT",
    default="200G",
    metavar="SIZE",
    help="The total size that all your copies in DIR may have [default: 200G].",
)
@click.option("--all-nodes", is_flag=True, help="In a Slurm job, copy to DIR on every node.")
@click.option(
    "--by",
    envvar="STAGE_BY",
    type=click.Choice(["sbcast", "copy"]),
    default="sbcast",
    help="With --all-nodes: send with sbcast, or let each node copy the file itself "
    "[default: sbcast].",
)
@click.option(
    "--look",
    is_flag=True,
    help="Only check whether DIR has the copy, and make room for it if not (exit code 1).",
)
@click.option(
    "--arrived",
    type=click.Path(path_type=Path),
    metavar="COPY",
    help="Instead of copying, check and use COPY, a file that is already on DIR's disk.",
)
@click.option("--digest", metavar="DIGEST", help="The digest of FILE.sqsh, which saves reading it.")
def stage(
    file: Path,
    folder: Path,
    limit: str,
    all_nodes: bool,
    by: str,
    look: bool,
    arrived: Path | None,
    digest: str | None,
) -> None:
    """Copy FILE.sqsh to DIR on this machine, if needed, and print the copy's path.

    Standard output has only that path, for scripts.
    """
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter, size
    from sqshforge.squash import stage as staging

    for name, given in (("--look", look), ("--arrived", arrived), ("--digest", digest)):
        if all_nodes and given:
            raise RequestError(
                f"{name} cannot be combined with --all-nodes: it is for one node",
                fix="leave one of the two out",
            )
    file, folder = file.absolute(), folder.absolute()
    most = size(limit, "--limit or STAGE_LIMIT")
    arrived = arrived and arrived.absolute()
    if look:
        there = staging.look(file, folder, most, Reporter(), arrived, digest)
        sys.exit(0 if there else staging.LACKING)
    if all_nodes:
        tree = by == "sbcast"
        place = staging.stage_everywhere(file, folder, limit, Programs(), Reporter(), tree=tree)
    else:
        place = staging.stage(file, folder, most, Reporter(), arrived, digest)
    click.echo(os.fsencode(place))  # exact, even if it is not valid UTF-8


@click.group(cls=Commands)
def cache() -> None:
    """List or remove bases: the cached parts of images that make the next pack fast."""


@cache.command("ls")
def cache_ls() -> None:
    """List the bases, most recently used first."""
    from datetime import datetime

    from sqshforge.host import suggest
    from sqshforge.host.terminal import human, show_lines
    from sqshforge.squash.cache import Cache

    ours = Cache.of_user()
    bases = ours.bases()
    for base in bases:
        used = datetime.fromtimestamp(base.used).strftime("%Y-%m-%d %H:%M")
        show_lines(f"{base.path.stem[:12]}  {human(base.size):>9}  {used}  {base.source}")
    total = sum(base.size for base in bases)
    show_lines(
        f"{ours.folder}: {len(bases)} bases, {human(total)} of {human(ours.limit)}",
        f"next: {suggest.sqshforge('cache', 'prune', '--keep', '20G')}",
    )


@cache.command("prune")
@click.option(
    "--keep", default="0", metavar="SIZE", help="The total size to keep, such as 20G [default: 0]."
)
def cache_prune(keep: str) -> None:
    """Remove bases, least recently used first, until the rest takes at most SIZE.

    Whatever SIZE is, this also removes files that failed or killed packers left in the cache. It
    lists what killed commands left elsewhere, with the command that removes each.
    """
    from sqshforge.doctor import leftovers
    from sqshforge.host import suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import human, show_lines, size
    from sqshforge.squash.cache import Cache

    ours = Cache.of_user()
    gone = ours.prune(size(keep, "--keep"))
    show_lines(f"removed {len(gone)} bases, {human(sum(base.size for base in gone))}")
    left = ours.remove_orphans()
    if left:
        what = f"{len(left)} files that failed or killed packers left"
        show_lines(f"removed {what}, {human(sum(left))}")
    for found in leftovers.findings(Programs()):
        if not found.ok:
            show_lines(f"{found.what}: {found.detail}", f"  to remove it: {found.fix}")
    show_lines(f"next: {suggest.sqshforge('cache', 'ls')}")


COMMANDS = (pack, smoke_test, run, stage, cache)
