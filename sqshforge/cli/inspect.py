"""The commands that examine and sign squash files: inspect, diff, verify, sign."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

as_path = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")


@click.command()
@click.argument("file", type=as_path, metavar="FILE.sqsh")
@json_option
@click.option("--plot", type=as_path, metavar="FILE.png", help="Also plot what takes the space.")
def inspect(file: Path, as_json: bool, plot: Path | None) -> None:
    """Show the content and origin of FILE.sqsh, and what takes its space."""
    from sqshforge.host import suggest
    from sqshforge.host.terminal import show_lines, show_table
    from sqshforge.inspect import inspect as inspection

    found = inspection.inspect(file)
    if plot is not None:
        from sqshforge.inspect.plot import draw

        draw(found, plot)
    if as_json:
        click.echo(found.json())
        return
    show_lines(*found.lines())
    for table in found.tables():
        show_lines("")
        show_table(table)
    if plot is not None:
        show_lines("", f"{plot}: drawn")
    show_lines("", f"next: {suggest.sqshforge('verify', file)}")


@click.command()
@click.argument("before", type=as_path, metavar="A.sqsh")
@click.argument("after", type=as_path, metavar="B.sqsh")
@json_option
@click.option("--exit-code", is_flag=True, help="Exit with code 1 if they differ.")
def diff(before: Path, after: Path, as_json: bool, exit_code: bool) -> NoReturn:
    """Show what was added, removed and changed between A.sqsh and B.sqsh."""
    from sqshforge.host import suggest
    from sqshforge.host.terminal import Reporter, show_lines
    from sqshforge.inspect import diff as changes

    found = changes.compare(before, after, Reporter())
    if as_json:
        click.echo(found.json())
    else:
        show_lines(*found.lines(), "", f"next: {suggest.sqshforge('inspect', after)}")
    sys.exit(1 if exit_code and not found.equal else 0)


@click.command()
@click.argument("file", type=as_path, metavar="FILE.sqsh")
@click.option(
    "--signers",
    type=as_path,
    envvar="SQSHFORGE_SIGNERS",
    metavar="FILE",
    help="Require a signature by a key in FILE, in ssh-keygen's allowed signers format "
    "[default: SQSHFORGE_SIGNERS, if set].",
)
@json_option
def verify(file: Path, signers: Path | None, as_json: bool) -> NoReturn:
    """Check that FILE.sqsh is intact and matches its record and its signature."""
    from sqshforge.host import suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.resources import processors
    from sqshforge.host.terminal import Reporter, show_lines, show_table
    from sqshforge.inspect import verify as verdict

    found = verdict.verify(file, signers, processors(), Programs(), Reporter())
    if as_json:
        checks = [asdict(check) for check in found.checks]
        click.echo(json.dumps({"file": str(file), "ok": found.ok, "checks": checks}, indent=2))
    else:
        show_table(found.table())
        show_lines("", f"{file}: {'verified' if found.ok else 'FAILED'}")
        if found.ok:
            show_lines(f"next: {suggest.sqshforge('smoke-test', suggest.sqsh(file))}")
    sys.exit(0 if found.ok else 1)


@click.command()
@click.argument("file", type=as_path, metavar="FILE.sqsh")
@click.option(
    "--key",
    type=as_path,
    metavar="FILE",
    required=True,
    help="A private SSH key, or a public key whose private key ssh-agent holds.",
)
def sign(file: Path, key: Path) -> None:
    """Sign FILE.sqsh with an SSH key, and write the signature to FILE.sqsh.sig."""
    from sqshforge.errors import WorkError
    from sqshforge.host import suggest
    from sqshforge.host.programs import Programs
    from sqshforge.host.resources import processors
    from sqshforge.host.terminal import Reporter, show_lines
    from sqshforge.inspect import signature
    from sqshforge.inspect import verify as verdict

    programs = Programs()
    using = signature.Key.of(key, programs)
    found = verdict.verify(file, None, processors(), programs, Reporter())
    faults = [one for one in found.checks if one.result == "FAILED" and one.name != "signature"]
    if faults:
        raise WorkError(
            f"the file was not signed: its {faults[0].name} is wrong: {faults[0].detail}",
            where=str(file),
            fix="pack it anew",
        )
    place = using.sign(file, signature.statement(file, found.digest), programs)
    show_lines(f"{place}: signed", f"next: {suggest.sqshforge('verify', file)}")


COMMANDS = (inspect, diff, verify, sign)
