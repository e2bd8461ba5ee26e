"""Random stacks of layers, merged by the package and by the simplest possible merge.

The simple one keeps a dictionary of whole paths. Both must refuse the same stacks.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqshforge.errors import WorkError
from tests.support import archives
from tests.support.archives import Image, Member, file, folder, layer, link, symlink


class Thing(NamedTuple):
    """What is at a path; a file and its hard links share a number."""

    kind: str
    text: str
    mode: int
    number: int


class Borrowed(Thing):
    """A hard link to a lower layer's file, which nothing of its own layer can link to."""


class Step(NamedTuple):
    """One entry of a layer."""

    kind: str
    path: str
    target: str
    mode: int


NOTHING = Step("folder", ".", "", 0o755)  # engines leave the root's attributes alone


class RefusedError(Exception):
    """A step that no engine can perform."""


Paths = dict[str, Thing]
IMPLIED = Thing("folder", "implied", 0o755, 0)


def within(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/") or not folder


def walk(tree: Paths, path: str, *, make: bool) -> str | None:
    """Return the real path of a folder, creating it with `make`; None if it cannot be."""
    at, todo, hops = "", path.split("/"), 0
    while todo:
        part = todo.pop(0)
        there = f"{at}/{part}".lstrip("/")
        if part in ("", "."):
            continue
        if part == "..":
            at = at.rpartition("/")[0]
        elif there not in tree:
            if not make:
                return None
            tree[there] = IMPLIED
            at = there
        elif tree[there].kind == "folder":
            at = there
        elif type(tree[there]) is Thing and tree[there].kind == "symlink" and hops < 40:
            hops += 1
            at = "" if tree[there].text.startswith("/") else at
            todo = tree[there].text.split("/") + todo
        elif make:
            raise RefusedError
        else:
            return None
    return at


def look_up(tree: Paths, path: str) -> Thing | None:
    parent = walk(tree, path.rpartition("/")[0], make=False)
    return None if parent is None else tree.get(f"{parent}/{path.rpartition('/')[2]}".lstrip("/"))


class Layer:
    """One layer, built step by step."""

    def __init__(self, lower: Paths) -> None:
        self.lower = lower
        self.upper: Paths = {}
        self.hidden: set[str] = set()
        self.opaque: set[str] = set()

    def clear(self, path: str) -> None:
        for one in [one for one in self.upper if one == path or within(one, path)]:
            del self.upper[one]
        for names in (self.hidden, self.opaque):
            names -= {one for one in names if within(one, path)}
        self.opaque.discard(path)

    def take(self, step: Step, number: int) -> None:
        found = self.target(step.target) if step.kind == "link" else None
        parent = walk(self.upper, step.path.rpartition("/")[0], make=True)
        path = f"{parent}/{step.path.rpartition('/')[2]}".lstrip("/")
        if step.kind == "whiteout":
            self.hidden.add(path)
        elif step.kind == "opaque":
            self.opaque.add(path.rpartition("/")[0])
        elif step.kind == "null":
            self.clear(path)
            self.hidden.add(path)
        elif step.kind == "folder":
            if path in self.upper and self.upper[path].kind != "folder":
                self.clear(path)
            self.upper[path] = Thing("folder", "", step.mode, 0)
        else:
            self.clear(path)
            text = step.target or f"{number}"
            self.upper[path] = found or Thing(step.kind, text, step.mode, number)

    def target(self, path: str) -> Thing:
        found = look_up(self.upper, path)
        if found is None and (below := look_up(self.lower, path)) is not None:
            found = Borrowed(*below)
        if found is None or found.kind == "folder":
            raise RefusedError
        return found


def on_top(lower: Paths, upper: Paths, hidden: set[str], opaque: set[str]) -> Paths:
    gone = {
        one
        for one in lower
        if any(one == name or within(one, name) for name in hidden)
        or any(within(one, name) for name in opaque)
        or any(within(one, name) for name in upper if upper[name].kind != "folder")
    }
    tree = {one: thing for one, thing in lower.items() if one not in gone}
    for path, thing in upper.items():
        if thing is not IMPLIED or path not in tree or tree[path].kind != "folder":
            tree[path] = Thing(*thing)
    return tree


def member(step: Step, number: int) -> Member:
    parent, _, name = step.path.rpartition("/")
    prefix = f"{parent}/" if parent else ""
    if step.kind == "whiteout":
        return file(f"{prefix}.wh.{name}")
    if step.kind == "opaque":
        return file(f"{prefix}.wh..wh..opq")
    if step.kind == "null":
        return file(step.path, type=tarfile.CHRTYPE)
    if step.kind == "folder":
        return folder(step.path, step.mode)
    if step.kind == "symlink":
        return symlink(step.path, step.target)
    if step.kind == "link":
        return link(step.path, step.target)
    return file(step.path, b"%d" % number, mode=step.mode)


def comparable(tree: dict[str, tuple[str, str, int, object]]) -> dict[str, object]:
    """Return a tree with hard links as the names that they join."""
    joined: dict[object, list[str]] = {}
    for name in sorted(tree):
        joined.setdefault(tree[name][3], []).append(name)
    return {
        name: (kind, text, mode if kind != "symlink" else 0, joined[key] if key else [])
        for name, (kind, text, mode, key) in tree.items()
    }


def simply(stack: list[list[Step]]) -> dict[str, object]:
    """Merge a stack; checks that impossible steps are refused, and leaves them out."""
    tree: Paths = {}
    for index, steps in enumerate(stack, 1):
        here = Layer(tree)
        for number, step in enumerate(list(steps)):
            before = dict(here.upper), set(here.hidden), set(here.opaque)
            try:
                here.take(step, 1000 * index + number)
            except RefusedError:
                assert ours([*stack[: index - 1], steps[: number + 1]]) is None
                here.upper, here.hidden, here.opaque = before
                steps[number] = NOTHING
        tree = on_top(tree, here.upper, here.hidden, here.opaque)
    texts = {name: "" if thing.kind == "folder" else thing.text for name, thing in tree.items()}
    return comparable(
        {name: (one.kind, texts[name], one.mode, one.number) for name, one in tree.items()}
    )


def ours(stack: list[list[Step]]) -> dict[str, object] | None:
    """Merge a stack with the package; None if it refuses the stack."""
    layers = [
        layer(*(member(step, 1000 * index + number) for number, step in enumerate(steps)))
        for index, steps in enumerate(stack, 1)
    ]
    with tempfile.TemporaryDirectory() as place:
        address = archives.write(Image(layers), "docker-archive", Path(place) / "image")
        try:
            tree = archives.parsed(archives.output(address, files={}))
        except WorkError:
            return None
    found: dict[str, tuple[str, str, int, object]] = {}
    for name in tree:
        key = tree[name][0].linkname if tree[name][0].islnk() else name
        one, content = tree[key]
        if one.isdir():
            found[name] = ("folder", "", one.mode, 0)
        elif one.issym():
            found[name] = ("symlink", one.linkname, one.mode, key)
        else:
            found[name] = ("file", content.decode(), one.mode, key)
    return comparable(found)


# Few names, so that they collide; most files lie where no folder is looked for.
folders = st.lists(st.sampled_from("ab"), max_size=2).map(
    lambda names: "".join(f"{n}/" for n in names)
)
paths = st.builds("{}{}".format, folders, st.sampled_from("xxyyzab"))
places = st.builds("{}{}".format, folders, st.sampled_from("ababx"))
targets = st.one_of(places, places.map("/{}".format), places.map("../{}".format), st.just("."))
modes = st.sampled_from([0o644, 0o4755])
step = st.one_of(
    st.builds(Step, st.just("file"), paths, st.just(""), modes),
    st.builds(Step, st.just("folder"), places, st.just(""), modes.map(lambda mode: mode | 0o711)),
    st.builds(Step, st.just("symlink"), places, targets, st.just(0o777)),
    st.builds(Step, st.just("link"), paths, paths, st.just(0)),
    st.builds(
        Step, st.sampled_from(["whiteout", "opaque", "null"]), places, st.just(""), st.just(0)
    ),
    st.builds(Step, st.just("file"), paths, st.just(""), modes),
)
stacks = st.lists(st.lists(step, max_size=7), min_size=1, max_size=4)


@pytest.mark.slow
@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(stacks)
def test_a_stack_merges_as_in_the_simple_merge(stack: list[list[Step]]) -> None:
    expected = simply(stack)
    assert ours(stack) == expected
