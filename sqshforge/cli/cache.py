"""The command that looks at kept bases and clears them: cache ls, cache prune."""

from __future__ import annotations

import click


@click.group()
def cache() -> None:
    """Look at, or clear, the bases that make the next pack of an image fast."""


@cache.command("ls")
def cache_ls() -> None:
    """List the kept bases, the last used first."""
    from datetime import datetime

    from sqshforge.host import suggest
    from sqshforge.host.terminal import human
    from sqshforge.squash.cache import Cache

    ours = Cache.of_user()
    bases = ours.bases()
    for base in bases:
        used = datetime.fromtimestamp(base.used).strftime("%Y-%m-%d %H:%M")
        click.echo(f"{base.path.stem[:12]}  {human(base.size):>9}  {used}  {base.source}")
    total = sum(base.size for base in bases)
    click.echo(f"{ours.folder}: {len(bases)} bases, {human(total)} of {human(ours.limit)}")
    click.echo(f"next: {suggest.sqshforge('cache', 'prune', '--keep', '20G')}")


@cache.command("prune")
@click.option("--keep", default="0", metavar="SIZE", help="What may stay, such as 20G [default: 0]")
def cache_prune(keep: str) -> None:
    """Remove bases, the least recently used first, until SIZE holds the rest."""
    from sqshforge.host import suggest
    from sqshforge.host.terminal import human, size
    from sqshforge.squash.cache import Cache

    gone = Cache.of_user().prune(size(keep))
    click.echo(f"removed {len(gone)} bases, {human(sum(base.size for base in gone))}")
    click.echo(f"next: {suggest.sqshforge('cache', 'ls')}")


COMMANDS = (cache,)
