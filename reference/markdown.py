"""Pages and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MARK = "<!-- Written by `make reference` from {source}. -->"
"""The first line of a page that is written from the code."""


def page(title: str, source: str, *blocks: str) -> str:
    """Format a page: what wrote it, its title, and blocks separated by empty lines."""
    return "\n\n".join([MARK.format(source=source), f"# {title}", *blocks]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; its cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """Format a cell's text as code; empty for an empty text."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def prose(text: str) -> str:
    """Format a sentence as one line of Markdown, with names, options and addresses as code."""
    return " ".join(map(_word, text.split())).replace("` `", " ")


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"\.(?=\s)", docstring.strip(), maxsplit=1)[0].rstrip(".")


CODE = re.compile(r"_|://|=|^--?[a-z]|\w/|^[\w-]+:[A-Z\[{]|\.sqsh|^\{|\*")
CLOSING = {")": "(", "]": "[", "}": "{"}


def _word(word: str) -> str:
    core = word.lstrip("([")
    before, after = word[: len(word) - len(core)], ""
    while core and (core[-1] in ".,;:" or CLOSING.get(core[-1], core) not in core):
        core, after = core[:-1], core[-1] + after
    if core.startswith("`") and core.endswith("`"):
        return word
    if core.endswith("'s"):
        core, after = core[:-2], "'s" + after
    shown = code(core) if CODE.search(core) else re.sub(r"([\\|<>`])", r"\\\1", core)
    return f"{before}{shown}{after}"
