"""The command line: each command is a few lines around one step.

Modules are imported by the commands that use them, so that `sqshforge run`, which stands between
Slurm and a training process, starts fast.
"""

from __future__ import annotations

import difflib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from sqshforge import __version__
from sqshforge.errors import RequestError, SqshforgeError
from sqshforge.look.commands import COMMANDS


class Commands(click.Group):
    """A group whose unknown commands are answered with the nearest known one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            raise RequestError(
                f"unknown command {args[0]!r}",
                mend=f"did you mean {near[0]}?" if near else "sqshforge --help lists all commands",
            ) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """From recipe to running job: training images as enroot squash files.

    Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 3 something is missing.
    """


def main() -> NoReturn:
    """Entry point: domain errors become a few lines and their exit code, never a traceback."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = cli.main(standalone_mode=False)
    except SqshforgeError as error:
        click.echo("\n".join(error.lines()), err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 128 + signal.SIGINT
    except OSError as error:
        # What a command foresees is a domain error; this is the disk or the system itself.
        place = f"\n  where: {error.filename}" if error.filename else ""
        click.echo(f"error: {error.strerror or error}{place}", err=True)
        code = 1
    sys.exit(code)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Leave by way of every `finally`, so that nothing partial stays behind."""
    sys.exit(128 + number)


engine_option = click.option(
    "--engine",
    envvar="ENGINE",
    default=None,
    help="docker or buildah [default: docker if a daemon answers, else buildah]",
)


set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another parameter of a recipe."
)


def _steps(engine: str | None, settings: tuple[str, ...] = ()) -> Any:
    from sqshforge import project
    from sqshforge.programs import Programs
    from sqshforge.progress import Reporter
    from sqshforge.steps import Steps

    parameters = _pairs(settings, "--set")
    return Steps(project.find(), engine, Programs(), Reporter(), parameters)


def _pairs(words: tuple[str, ...], option: str) -> dict[str, str]:
    """NAME=VALUE, each once or more; `RequestError` for a word that is none."""
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not name or not separator:
            raise RequestError(
                f"{word!r} is not NAME=VALUE", where=option, mend=f"{option} NAME=VALUE"
            )
        pairs[name] = value
    return pairs


@cli.command()
def targets() -> None:
    """List all targets."""
    from sqshforge import project, recipe

    recipes = project.find().recipes
    names = recipe.targets(recipes)
    for name in names:
        click.echo(f"{name:{max(map(len, names))}}  {recipe.find(name, recipes).title}")


@cli.command()
@click.argument("target")
def show(target: str) -> None:
    """Show what a target's image is made of."""
    from sqshforge import lock, project, recipe

    recipes = project.find().recipes
    what = recipe.find(target, recipes)
    locked = lock.load(what, recipes)
    base = what.base.bootstrap
    click.echo(f"{what.target}: {what.title}")
    click.echo(f"accelerator  {what.accelerator}")
    click.echo(
        f"base         {what.base.image}" + (f", or {base.suite} by packages" if base else "")
    )
    click.echo(f"Debian       {' '.join(what.apt)}")
    click.echo(f"Python       {what.python.version}")
    for package in locked.python.packages:
        click.echo(f"               {package.name} {package.version}")
    click.echo(f"launchers    {' '.join(what.launchers)}")
    for entry in locked.unlocked:
        click.echo(f"not locked   {entry}")
    click.echo(f"\nnext: make image TARGET={target}")


@cli.command()
@click.argument("target")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR")
def render(target: str, output: Path) -> None:
    """Write a target's Dockerfile and build context to DIR."""
    from sqshforge import lock, project, recipe
    from sqshforge import render as rendering

    home = project.find()
    what = recipe.find(target, home.recipes)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(
            "the output folder is not empty", where=str(output), mend="name a new or empty folder"
        )
    context = rendering.context(what, lock.load(what, home.recipes), home.root, {})
    context.write(output.absolute())
    click.echo(f"{output / 'Dockerfile'}\nnext: make image TARGET={target}")


@cli.command()
@click.argument("target", required=False)
@click.option("--check", is_flag=True, help="Write nothing; fail where a lock would change.")
def lock(target: str | None, check: bool) -> None:
    """Resolve the pins of a recipe, or of all, to versions and hashes."""
    from sqshforge import lock as locks
    from sqshforge import machine, mirrors, project, recipe
    from sqshforge.programs import Programs
    from sqshforge.progress import Reporter

    home = project.find()
    programs = Programs()
    drifted = []
    for name in [target] if target else recipe.targets(home.recipes):
        what = recipe.find(name, home.recipes)
        path = locks.path_of(name, home.recipes)
        before = locks.earlier(name, home.recipes)
        asked = locks.Asked(
            project=home,
            pip=machine.pip(programs),
            mirrors=mirrors.read(home.root),
            programs=programs,
            reporter=Reporter(),
            before=before,
        )
        locked = locks.resolve(what, asked)
        for entry in locked.unlocked:
            click.echo(f"{name}: not locked: {entry}", err=True)
        changes = locks.changes(before, locked)
        for change in changes:
            click.echo(f"{name}: {change}", err=True)
        if changes and check:
            drifted.append(name)
        elif not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(locked.text())
        click.echo(f"{path}: {('drifted' if check else 'written') if changes else 'up to date'}")
    if drifted:
        raise SqshforgeError(
            f"locks have drifted: {', '.join(drifted)}",
            where=str(home.recipes / "locks"),
            mend="; ".join(f"sqshforge lock {name}" for name in drifted),
        )
    click.echo(f"next: make image TARGET={target or 'cpu-mamba'}")


@cli.command()
@click.argument("target")
@set_option
@engine_option
def vendor(target: str, settings: tuple[str, ...], engine: str | None) -> None:
    """Gather all that a build takes from outside, for OFFLINE=1."""
    from sqshforge.units import human

    folder, bundle = _steps(engine, settings).vendor(target)
    size = sum(one.path.stat().st_size for one in bundle.supplies)
    click.echo(f"{folder}: {len(bundle.supplies)} files, {human(size)}")
    click.echo(f"next: make image TARGET={target} OFFLINE=1")


@cli.command()
def schema() -> None:
    """Print the JSON Schema of recipes (recipes/schema.json is a copy for editors)."""
    from sqshforge import recipe

    click.echo(recipe.schema(), nl=False)


@cli.command()
@click.argument("target")
@set_option
@engine_option
def build(target: str, settings: tuple[str, ...], engine: str | None) -> None:
    """Build a target's image."""
    from sqshforge.units import duration, human

    built = _steps(engine, settings).build(target)
    state = "up to date" if built.up_to_date else f"built in {duration(built.seconds)}"
    click.echo(f"{built.source}: {state}, {human(built.image.size)}")
    click.echo(f"next: make sqsh TARGET={target}")


@cli.command()
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.sqsh")
@click.option("--profile", default="shared", help="fast, shared or archive [default: shared]")
@click.option("--jobs", type=click.IntRange(min=1), help="[default: the processors of this job]")
@click.option("--force", is_flag=True, help="Pack even where the file is up to date or not ours.")
@click.option("--xattrs", is_flag=True, help="Keep extended attributes and file capabilities.")
@click.option("--no-cache", is_flag=True, help="Keep no base for the next pack, and use none.")
@click.option("--export", is_flag=True, help="Read docker's image by docker export: mount nothing.")
@set_option
@engine_option
def pack(
    source: str,
    output: Path | None,
    profile: str,
    jobs: int | None,
    force: bool,
    xattrs: bool,
    no_cache: bool,
    export: bool,
    settings: tuple[str, ...],
    engine: str | None,
) -> None:
    """Pack SOURCE as a squash file for enroot and pyxis.

    SOURCE is a target (built first if needed), dockerd://NAME[:TAG], buildah://NAME[:TAG],
    oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME:TAG], rootfs:DIR or
    docker://HOST/NAME[:TAG] (a registry, read through skopeo).
    """
    from sqshforge import rootless, squash
    from sqshforge import source as sources
    from sqshforge.cache import Cache
    from sqshforge.programs import Programs
    from sqshforge.progress import Reporter
    from sqshforge.units import duration, human

    options = squash.Options.of(profile, jobs=jobs, force=force, xattrs=xattrs)
    cache = None if no_cache else Cache.of_user()
    # Extended attributes are not what they are in the namespace that comes with what is lent.
    way = sources.Way.EXPORTED if export else sources.Way.OWN if xattrs else sources.Way.LENT
    if sources.is_address(source):
        if output is None:
            raise RequestError("pack needs an output for this source", mend="add -o FILE.sqsh")
        programs = Programs()
        rootless.enter(source, programs)
        reporter = Reporter()
        image = sources.parse(source, programs, reporter, way)
        packed = squash.pack(image, output, options, programs, reporter, cache)
    else:
        steps = _steps(engine, settings)
        built = steps.build(source)
        rootless.enter(built.source, steps.programs)
        packed = steps.pack(built, output or steps.project.sqsh(source), options, cache, way)
    state = "up to date" if packed.up_to_date else f"packed in {duration(packed.seconds)}"
    click.echo(f"{packed.path}: {state}, {human(packed.size)}")
    click.echo(f"next: sqshforge smoke-test {packed.path}")


@cli.group()
def cache() -> None:
    """Look at, or clear, the bases that make the next pack of an image fast."""


@cache.command("ls")
def cache_ls() -> None:
    """List the kept bases, the last used first."""
    from datetime import datetime

    from sqshforge.cache import Cache
    from sqshforge.units import human

    ours = Cache.of_user()
    bases = ours.bases()
    for base in bases:
        used = datetime.fromtimestamp(base.used).strftime("%Y-%m-%d %H:%M")
        click.echo(f"{base.path.stem[:12]}  {human(base.size):>9}  {used}  {base.source}")
    total = sum(base.size for base in bases)
    click.echo(f"{ours.folder}: {len(bases)} bases, {human(total)} of {human(ours.limit)}")


@cache.command("prune")
@click.option("--keep", default="0", metavar="SIZE", help="What may stay, such as 20G [default: 0]")
def cache_prune(keep: str) -> None:
    """Remove bases, the least recently used first, until SIZE holds the rest."""
    from sqshforge.cache import Cache
    from sqshforge.units import human, size

    gone = Cache.of_user().prune(size(keep))
    click.echo(f"removed {len(gone)} bases, {human(sum(base.size for base in gone))}")


for command in COMMANDS:
    cli.add_command(command)


@cli.command(context_settings={"ignore_unknown_options": False})
@click.argument("image", type=click.Path(path_type=Path), metavar="FILE.sqsh")
@click.option("--mount", "mounts", multiple=True, metavar="SRC:DST", help="Bind a host path.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    image: Path, mounts: tuple[str, ...], variables: tuple[str, ...], command: tuple[str, ...]
) -> NoReturn:
    """Start a sqsh and run COMMAND in it (after --); its exit code is passed on."""
    from sqshforge.programs import Programs
    from sqshforge.runtime import start
    from sqshforge.runtime.mount import Mount

    start.run(
        image,
        command,
        mounts=[Mount.parse(one) for one in mounts],
        environment=_pairs(variables, "--env"),
        programs=Programs(),
    )


@cli.command("smoke-test")
@click.argument("subject", metavar="TARGET|FILE.sqsh")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@set_option
@engine_option
def smoke_test(
    subject: str, as_json: bool, settings: tuple[str, ...], engine: str | None
) -> NoReturn:
    """Prove that an image can do its job, inside it."""
    import json
    from dataclasses import asdict

    from sqshforge import smoke, squash
    from sqshforge.cache import Cache
    from sqshforge.programs import Programs
    from sqshforge.progress import Reporter
    from sqshforge.terminal import show_table

    if "/" in subject or subject.endswith(".sqsh"):
        image = Path(subject)
    else:
        steps = _steps(engine, settings)
        place = steps.project.sqsh(subject)
        options = squash.Options.of("shared")
        image = steps.pack(steps.build(subject), place, options, Cache.of_user()).path
    outcome = smoke.run(image, Programs(), Reporter())
    if as_json:
        click.echo(json.dumps(asdict(outcome), indent=2))
    else:
        show_table(outcome.table())
        click.echo(f"\n{image}: {'passed' if outcome.ok else 'FAILED'}")
        if outcome.ok:
            click.echo("next: sbatch --nodes=2 launch/mamba_fsdp.sbatch")
    sys.exit(0 if outcome.ok else 1)


@cli.command()
@click.argument("target", default="cpu-mamba")
@click.option("--since", type=float, help="When set-up began, in seconds of the epoch.")
@engine_option
def quickstart(target: str, since: float | None, engine: str | None) -> NoReturn:
    """Build, pack and smoke-test a target; end with a table of the steps."""
    from sqshforge import quickstart as whole
    from sqshforge.terminal import show_table

    report = whole.go(_steps(engine), target, since)
    show_table(report.table())
    click.echo(f"\nnext: {report.next_command}")
    sys.exit(0 if report.ok else 1)


@cli.command()
def doctor() -> NoReturn:
    """Tell what is there and what is missing, with the command that mends it."""
    from sqshforge import doctor as examination
    from sqshforge import project
    from sqshforge.programs import Programs

    findings = examination.examine(project.find().build, Programs())
    click.echo("\n".join(examination.lines(findings)))
    missing = [one for one in findings if one.needed and not one.ok]
    click.echo(f"\n{len(missing)} missing" if missing else "\nall there\nnext: make quickstart")
    sys.exit(3 if missing else 0)
