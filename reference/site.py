"""mkdocs' hook: links that leave docs/ hold on the site too, as they do in a checkout.

Pages and pictures of other folders that docs/ links to become part of the site, below project/. A
link to anything else, such as code, leads to the published checkout where `repo_url` names it; else
its words stay and the link goes.
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
"""Files of the checkout that are part of the site beside docs/."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"(!\[[^\]]*\])\((?!\w+:)([^)\s]+)\)")
ESCAPED = re.compile(r"^\|.*\\\|.*$", re.MULTILINE)
SPAN = re.compile(r"`[^`\n]+`")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Take the pages of other folders in."""
    for path in OUTSIDE:
        files.append(File.generated(config, f"{FOLDER}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put the site's own addresses into the links of a page."""
    return unescaped(relinked(markdown, page.file.src_uri, config.repo_url))


def unescaped(text: str) -> str:
    """A text whose tables have no backslash before a `|` of code: mkdocs would show it."""

    def plain(row: re.Match[str]) -> str:
        return SPAN.sub(lambda code: code[0].replace("\\|", "|"), row[0])

    return ESCAPED.sub(plain, text)


def relinked(text: str, uri: str, repository: str | None) -> str:
    """A page's text with links that hold on the site.

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

    parts = CODE.split(text)  # every other one is code
    parts[::2] = [PICTURE.sub(picture, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def _place(uri: str, target: str) -> str:
    """Where in the checkout a link of a page leads."""
    own = PurePosixPath(uri)
    inside = own.parts[0] == FOLDER
    page = PurePosixPath(*own.parts[1:]) if inside else PurePosixPath("docs") / own
    return os.path.normpath(page.parent / target)


def _on_site(place: str) -> str | None:
    """The place on the site of a file of the checkout; None for what is not there."""
    if place in OUTSIDE:
        return f"{FOLDER}/{place}"
    path = PurePosixPath(place)
    return str(path.relative_to("docs")) if path.parts[0] == "docs" and path.suffix else None


def _relative(there: str, uri: str) -> str:
    return os.path.relpath(there, PurePosixPath(uri).parent)
