"""Pages and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MARK = "<!-- Written by `make reference` from {source}. -->"
"""How a page that is written from the code begins."""


def page(title: str, source: str, *blocks: str) -> str:
    """A page: what wrote it, its title, and blocks with an empty line between them."""
    return "\n\n".join([MARK.format(source=source), f"# {title}", *blocks]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """A cell's word or words as code; none for none."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def prose(text: str) -> str:
    """A sentence of the code as Markdown, in one line: names, options and addresses are code."""
    return " ".join(map(_word, text.split())).replace("` `", " ")


def first_sentence(docstring: str) -> str:
    """What a docstring says first."""
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
