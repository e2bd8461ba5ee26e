"""The commands on targets: targets, show, render, lock, outdated, schema, vendor, build."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sqshforge import platforms
from sqshforge.cli import completion
from sqshforge.cli.options import (
    engine_option,
    following,
    platform_option,
    set_option,
    steps_of,
)
from sqshforge.errors import RequestError, SqshforgeError
from sqshforge.run.pairs import parse_pairs


@click.command()
def targets() -> None:
    """List all targets."""
    from sqshforge import project, recipe

    recipes = project.find().recipes
    names = recipe.targets(recipes)
    for name in names:
        click.echo(f"{name:{max(map(len, names))}}  {recipe.find(name, recipes).title}")


@click.command()
@click.argument("target", shell_complete=completion.targets)
@platform_option
def show(target: str, platform: str | None) -> None:
    """Show the components of a target's image."""
    from sqshforge import lock, project, recipe

    home = project.find()
    recipes = home.recipes
    what = recipe.find(target, recipes, platform=platform)
    locked = lock.load(what, recipes)
    base = what.base.bootstrap
    click.echo(f"{what.target}: {what.title}")
    others = [one for one in recipe.platforms_of(target, recipes) if one != what.platform.name]
    also = f", also for {', '.join(others)}" if others else ""
    click.echo(f"platform     {what.platform.name}{also}")
    click.echo(f"accelerator  {what.accelerator}")
    click.echo(
        f"base         {what.base.image}" + (f", or {base.suite} by packages" if base else "")
    )
    click.echo(f"Debian       {' '.join(what.apt)}")
    click.echo(f"Python       {what.python.version}")
    python = locked.python
    every = (*python.packages, *python.built, *python.of_indexes())
    for package in sorted(every, key=lambda one: one.name):
        click.echo(f"               {package.name} {package.version}")
    click.echo(f"launchers    {' '.join(what.launchers)}")
    for entry in locked.unlocked:
        click.echo(f"not locked   {entry}")
    click.echo(f"\nnext: {following(home.root, 'image', target, platform)}")


@click.command()
@click.argument("target", shell_complete=completion.targets)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The folder to write to.",
)
@set_option
@platform_option
def render(target: str, output: Path, settings: tuple[str, ...], platform: str | None) -> None:
    """Write a target's Dockerfile and build context to DIR."""
    from sqshforge import project
    from sqshforge.build import dockerfile as rendering
    from sqshforge.cli.workflow import wanted

    home = project.find()
    what, locked = wanted(target, home.recipes, parse_pairs(settings, "--set"), platform)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(
            "the output folder is not empty", where=str(output), fix="name a new or empty folder"
        )
    rendering.context(what, locked, home.root, {}).write(output.absolute())
    click.echo(output / "Dockerfile")
    click.echo(f"next: {following(home.root, 'image', target, platform, settings)}")


@click.command()
@click.argument("target", required=False, shell_complete=completion.targets)
@click.option("--check", is_flag=True, help="Write nothing; fail if a lock would change.")
@click.option(
    "--platform",
    type=click.Choice(tuple(platforms.ALL)),
    help="Write only the lock of this platform [default: of every platform of the recipe].",
)
def lock(target: str | None, check: bool, platform: str | None) -> None:
    """Resolve the pins of one or all recipes to versions and hashes, per platform.

    A base image that is no longer in its registry is reported, with what to do; --check fails if
    none of its addresses has it.
    """
    from sqshforge import lock as locks
    from sqshforge import project, recipe
    from sqshforge.host import files, suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter
    from sqshforge.lock import bases
    from sqshforge.network import access, mirrors
    from sqshforge.network.registries import Registries

    home = project.find()
    programs, registries = Programs(), Registries()
    drifted, found = [], []
    names = [target] if target is not None else recipe.targets(home.recipes)
    wanted = [
        recipe.find(name, home.recipes, platform=one)
        for name in names
        for one in recipe.platforms_of(name, home.recipes)
        if platform in (None, one)
    ]
    if target and not wanted:
        recipe.find(target, home.recipes, platform=platform)  # its error lists the platforms
    # A lock starts from that of the extended recipe or of the default platform: these come first.
    for what in sorted(
        wanted, key=lambda one: (len(recipe.ancestors(one, home.recipes)), one.platform.suffix)
    ):
        name = what.name
        path = locks.path_of(name, home.recipes)
        before = locks.earlier(name, home.recipes)
        asked = locks.Asked(
            project=home,
            pip=access.pip(programs),
            mirrors=mirrors.read_mirrors(home.root),
            programs=programs,
            reporter=Reporter(),
            before=before,
            parent=locks.inherited(what, home.recipes),
            registries=registries,
        )
        locked = locks.resolve(what, asked)
        found.append((what, locked))
        for entry in locked.unlocked:
            click.echo(f"{name}: not locked: {entry}", err=True)
        changes = locks.changes(before, locked)
        for change in changes:
            click.echo(f"{name}: {change}", err=True)
        state = "up to date"
        if changes and check:
            drifted.append(name)
            state = "drifted"
        elif locked != before and not check:
            path.parent.mkdir(exist_ok=True)
            files.publish(locked.text().encode(), path)
            other = ": other versions of Debian packages, which are noted and not pinned"
            state = "written" if changes else f"written{other}"
        click.echo(f"{path}: {state}")
    images = bases.wanted(found)
    remarks = bases.look(images, mirrors.read_mirrors(home.root), registries, programs)
    for line in [line for one in remarks for line in one.lines()]:
        click.echo(line, err=True)
    if drifted:
        raise SqshforgeError(
            f"locks have drifted: {', '.join(drifted)}",
            where=str(home.recipes / "locks"),
            fix="; ".join(
                suggest.sqshforge("lock", name)
                for name in dict.fromkeys(one.partition(".")[0] for one in drifted)
            ),
        )
    lost = [one for one in remarks if one.lost]
    if lost and check:
        raise SqshforgeError(
            f"no longer found in any registry: {', '.join(one.image for one in lost)}",
            where=str(home.recipes),
            fix=lost[0].fix,
        )
    click.echo(f"next: {following(home.root, 'image', target or 'cpu-mamba', platform)}")


@click.command()
@click.argument("target", required=False, shell_complete=completion.targets)
@click.option("--json", "as_json", is_flag=True, help="Print every pin as JSON.")
@platform_option
def outdated(target: str | None, as_json: bool, platform: str | None) -> None:
    """Show newer versions of the pins of one or all recipes, and what holds them back.

    Nothing is changed. Versions of packages come from the indexes that pip is configured with,
    those of sources from their git hosts, those of images from their registries. Hosts that do not
    answer are listed.
    """
    from sqshforge import lock as locks
    from sqshforge import outdated as pins
    from sqshforge import project, recipe
    from sqshforge.host import suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.terminal import Reporter, show_lines, show_table
    from sqshforge.network import access, mirrors

    home = project.find()
    programs = Programs()
    names = [target] if target is not None else recipe.targets(home.recipes)
    if not target and platform:
        names = [one for one in names if platform in recipe.platforms_of(one, home.recipes)]
    hosts = pins.Hosts(programs)
    found = []
    for what in [recipe.find(name, home.recipes, platform=platform) for name in names]:
        asked = locks.Asked(
            project=home,
            pip=access.pip(programs),
            mirrors=mirrors.read_mirrors(home.root),
            programs=programs,
            reporter=Reporter(),
            before=locks.earlier(what.name, home.recipes),
        )
        found += pins.survey(what, asked, hosts)
    if as_json:
        click.echo(json.dumps([pin.data() for pin in found], indent=2))
        pins.require_answers(found)
        return
    pins.require_answers(found)
    table = pins.table(found)
    if table.row_count:
        show_table(table)
        show_lines("")
    show_lines(f"{target or 'all targets'}: {pins.counts(found)}")
    words = {"TARGET": target} if target else {}
    show_lines(f"next: {suggest.make(home.root, 'lock', **words)}")


@click.command()
def schema() -> None:
    """Print the JSON Schema of recipes (recipes/schema.json is a copy for editors)."""
    from sqshforge import recipe

    click.echo(recipe.schema(), nl=False)


@click.command()
@click.argument("target", shell_complete=completion.targets)
@set_option
@platform_option
@engine_option
def vendor(
    target: str, settings: tuple[str, ...], platform: str | None, engine: str | None
) -> None:
    """Download everything that a build needs, to build offline with OFFLINE=1."""
    from sqshforge.build import inputs
    from sqshforge.host.terminal import human

    if inputs.offline():
        raise RequestError("vendor downloads, but OFFLINE is set", fix="leave OFFLINE out")
    steps = steps_of(engine, settings, platform)
    folder, bundle = steps.vendor(target)
    size = sum(one.path.stat().st_size for one in bundle.supplies)
    click.echo(f"{folder}: {len(bundle.supplies)} files, {human(size)}")
    root = steps.project.root
    click.echo(
        f"next: {following(root, 'image', target, platform, settings, engine, offline=True)}"
    )


@click.command()
@click.argument("target", shell_complete=completion.targets)
@set_option
@platform_option
@engine_option
def build(target: str, settings: tuple[str, ...], platform: str | None, engine: str | None) -> None:
    """Build a target's image."""
    from sqshforge.host.terminal import duration, human

    steps = steps_of(engine, settings, platform)
    built = steps.build(target)
    state = "up to date" if built.up_to_date else f"built in {duration(built.seconds)}"
    click.echo(f"{built.source}: {state}, {human(built.image.size)}")
    root = steps.project.root
    click.echo(f"next: {following(root, 'sqsh', target, platform, settings, engine)}")


COMMANDS = (targets, show, render, lock, outdated, schema, vendor, build)
