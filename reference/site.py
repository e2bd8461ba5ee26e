"""mkdocs' hook that keeps links that leave docs/ working on the site, as they do in a checkout.

Pages and pictures outside docs/ that docs/ links to become part of the site, below project/. A link
to anything else, such as code, leads to the published checkout if `repo_url` is set; otherwise only
its text stays.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "project"
OUTSIDE = (
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "launch/README.md"),
    *("recipes/keys/README.md", "benchmarks/results/pack.png"),
)
"""Files of the checkout outside docs/ that are part of the site."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"(!\[[^\]]*\])\((?!\w+:)([^)\s]+)\)")
ESCAPED = re.compile(r"^\|.*\\\|.*$", re.MULTILINE)
SPAN = re.compile(r"`[^`\n]+`")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, f"{FOLDER}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace the links of a page by addresses on the site."""
    return unescaped(relinked(markdown, page.file.src_uri, config.repo_url))


def unescaped(text: str) -> str:
    """Remove the backslash before each `|` in code inside tables, which mkdocs would show."""

    def plain(row: re.Match[str]) -> str:
        return SPAN.sub(lambda code: code[0].replace("\\|", "|"), row[0])

    return ESCAPED.sub(plain, text)


def relinked(text: str, uri: str, repository: str | None) -> str:
    """Return a page's text with links that work on the site.

    uri: the page's place on the site. repository: where the checkout is published, if it is.
    """

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        place = _place(uri, target)
        there = _on_site(place)
        if there is not None:
            return f"[{words}]({_relative(there, uri)}{anchor})"
        if repository:
            return f"[{words}]({repository.rstrip('/')}/blob/main/{place}{anchor})"
        return words

    def picture(found: re.Match[str]) -> str:
        there = _on_site(_place(uri, found[2]))
        return f"{found[1]}({_relative(there, uri)})" if there else found[0]

    parts = CODE.split(text)  # every second part is code
    parts[::2] = [PICTURE.sub(picture, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def _place(uri: str, target: str) -> str:
    """Return the path in the checkout that a page's link leads to."""
    own = PurePosixPath(uri)
    inside = own.parts[0] == FOLDER
    page = PurePosixPath(*own.parts[1:]) if inside else PurePosixPath("docs") / own
    return os.path.normpath(page.parent / target)


def _on_site(place: str) -> str | None:
    """Return a file's path on the site; None if it is not part of the site."""
    if place in OUTSIDE:
        return f"{FOLDER}/{place}"
    path = PurePosixPath(place)
    return str(path.relative_to("docs")) if path.parts[0] == "docs" and path.suffix else None


def _relative(there: str, uri: str) -> str:
    return os.path.relpath(there, PurePosixPath(uri).parent)
