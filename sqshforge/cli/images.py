"""The commands that make images and what they are made of: vendor, build."""

from __future__ import annotations

import click

from sqshforge.cli.options import engine_option, set_option, steps_of


@click.command()
@click.argument("target")
@set_option
@engine_option
def vendor(target: str, settings: tuple[str, ...], engine: str | None) -> None:
    """Gather all that a build takes from outside, for OFFLINE=1."""
    from sqshforge.host import suggest
    from sqshforge.host.terminal import human

    steps = steps_of(engine, settings)
    folder, bundle = steps.vendor(target)
    size = sum(one.path.stat().st_size for one in bundle.supplies)
    click.echo(f"{folder}: {len(bundle.supplies)} files, {human(size)}")
    click.echo(f"next: {suggest.make(steps.project, 'image', TARGET=target, OFFLINE='1')}")


@click.command()
@click.argument("target")
@set_option
@engine_option
def build(target: str, settings: tuple[str, ...], engine: str | None) -> None:
    """Build a target's image."""
    from sqshforge.host import suggest
    from sqshforge.host.terminal import duration, human

    steps = steps_of(engine, settings)
    built = steps.build(target)
    state = "up to date" if built.up_to_date else f"built in {duration(built.seconds)}"
    click.echo(f"{built.source}: {state}, {human(built.image.size)}")
    click.echo(f"next: {suggest.make(steps.project, 'sqsh', TARGET=target)}")


COMMANDS = (vendor, build)
