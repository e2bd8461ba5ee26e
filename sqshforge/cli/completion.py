"""What a shell offers at the Tab key: targets, profiles, engines, runs, files.

click speaks with bash, zsh and fish; commands, options and files it knows by itself. Each function
gives what begins with the word that is being typed.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from sqshforge.errors import SqshforgeError


def targets(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """The targets of this checkout; none where there is no checkout."""
    from sqshforge import project, recipe

    try:
        return _beginning(recipe.targets(project.find().recipes), word)
    except SqshforgeError:
        return []


def targets_or_files(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Targets, and files: bash offers those where no target begins so, zsh both."""
    return [*files(ctx, param, word), *targets(ctx, param, word)]


def profiles(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """The profiles of packing."""
    from sqshforge.squash.mksquashfs import PROFILES

    return _beginning(PROFILES, word)


def engines(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """The container engines."""
    from sqshforge.engine import NAMES

    return _beginning(NAMES, word)


def files(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Files and folders, which the shell itself finds."""
    return [CompletionItem(word, type="file")]


def folders(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Folders, which the shell itself finds."""
    return [CompletionItem(word, type="dir")]


def _beginning(names: Iterable[str], word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(word)]
