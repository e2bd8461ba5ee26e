"""Layers put on top of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqshforge.image.layer_tree import Folder, Node, Tree, find
from sqshforge.tar import limits
from sqshforge.tar.faults import broken, shown, too_much


def merged(trees: Iterable[Tree]) -> Folder:
    """The tree that a container of these layers would see; they themselves stay as they are.

    What a layer hides is of the layers below, wherever in its tar the whiteout stands.
    """
    root = Folder()
    for tree in trees:
        linked = {node: _found(root, node, path, tree) for node, path in tree.below.items()}
        _put(root, tree.root, linked)
    return root


def _put(lower: Folder, upper: Folder, linked: dict[Node, Node]) -> None:
    todo = [(lower, upper)]
    while todo:
        lower, upper = todo.pop()
        if upper.entry is not None:
            lower.entry = upper.entry
        if upper.is_opaque:
            lower.children.clear()
        for name in upper.hidden or ():
            lower.children.pop(name, None)
        for name, child in upper.children.items():
            if isinstance(child, Folder):
                there = lower.children.get(name)
                if not isinstance(there, Folder):
                    there = lower.children[name] = Folder()
                todo.append((there, child))
            else:
                lower.children[name] = linked.get(child, child)


def _found(root: Folder, link: Node, path: list[bytes], tree: Tree) -> Node:
    node = find(root, path, tree.count)
    if not isinstance(node, Node):
        raise broken(
            f"the hard link {shown(link.entry.name)} leads to {shown(link.entry.target)}, "
            "where no file is",
            tree.where,
        )
    node.is_linked = True
    return node


def named(root: Folder, keep: Callable[[bytes], bool], where: str) -> dict[bytes, Node | Folder]:
    """Path to what stands there; a folder that is not kept takes all that is in it along."""
    found: dict[bytes, Node | Folder] = {}
    size = 0
    todo = [(b"", root)]
    while todo:
        prefix, folder = todo.pop()
        for name, child in folder.children.items():
            path = prefix + name
            size += len(path)
            if len(path) >= limits.PATH or size > limits.TREE:  # links can lead ever deeper
                raise too_much(f"{shown(path)} and the other paths are too long", where)
            if keep(path):
                found[path] = child
                if isinstance(child, Folder):
                    todo.append((path + b"/", child))
    return found
