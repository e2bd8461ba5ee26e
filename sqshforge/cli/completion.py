"""Completion at the Tab key: targets, profiles, engines, runs, files.

click handles bash, zsh and fish, and completes commands, options and files by itself. Each function
returns what begins with the word being typed.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from sqshforge.errors import SqshforgeError


def targets(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete the targets of this checkout; none without a checkout."""
    from sqshforge import project, recipe

    try:
        return _beginning(recipe.targets(project.find().recipes), word)
    except SqshforgeError:
        return []


def targets_or_files(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete targets and files: bash offers files only if no target matches, zsh both."""
    return [*files(ctx, param, word), *targets(ctx, param, word)]


def profiles(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete the profiles of packing."""
    from sqshforge.squash.mksquashfs import PROFILES

    return _beginning(PROFILES, word)


def engines(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete the engines."""
    from sqshforge.engine import NAMES

    return _beginning(NAMES, word)


def files(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Let the shell complete files and folders."""
    return [CompletionItem(word, type="file")]


def folders(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Let the shell complete folders."""
    return [CompletionItem(word, type="dir")]


def _beginning(names: Iterable[str], word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(word)]
