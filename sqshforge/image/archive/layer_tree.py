"""The entries that one layer adds and hides, as a tree, and the merge of such trees.

A layer is laid out on its own, as docker and podman do on overlayfs, and then put on top of the
merge of the layers below it (`merged`). So an entry behind a symbolic link of its own layer goes
where the link leads, seen from the root of the layer, and nowhere else. A link of a layer below is
not followed: a folder replaces it. Folders that no entry of the layer names keep the attributes
from the layers below, or are made with mode 0755.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

from sqshforge.tar import limits
from sqshforge.tar.faults import broken, refused, shown, too_much
from sqshforge.tar.reader import CHAR, FILE, FOLDER, LINK, SYMLINK, Entry

WHITEOUT = b".wh."
RESERVED = b".wh..wh."
OPAQUE = b".wh..wh..opq"


class Node:
    """A file, a link, a device: anything but a folder. Hard links of a file share its node."""

    __slots__ = ("entry", "is_linked", "layer")

    def __init__(self, entry: Entry, layer: int) -> None:
        self.entry = entry
        self.layer = layer
        self.is_linked = False


class Folder:
    """A folder and its content; it has no entry if it is only a part of other entries' paths."""

    __slots__ = ("children", "entry", "hidden", "is_opaque")

    def __init__(self, entry: Entry | None = None) -> None:
        self.entry = entry
        self.children: dict[bytes, Node | Folder] = {}
        self.hidden: set[bytes] | None = None
        self.is_opaque = False


class Budget:
    """Limits the memory, the unpacked bytes and the path steps of an image's trees."""

    def __init__(self) -> None:
        self._memory = 0
        self._size = 0
        self._holes = 0
        self._steps = 0

    def walk(self, steps: int, where: str) -> None:
        self._steps += steps
        if self._steps > limits.STEPS:
            raise too_much("the ways to its entries are too long", where)

    def charge(self, count: int, where: str) -> None:
        self._memory += count
        if self._memory > limits.TREE:
            raise too_much("it has more names than fit into a gigabyte of memory", where)

    def add(self, entry: Entry, where: str) -> None:
        pieces = len(entry.segments) * limits.SEGMENT if entry.segments else 0
        texts = len(entry.name) + len(entry.target)
        texts += sum(len(key) + len(value) for key, value in entry.xattrs)
        self.charge(limits.NODE + texts + pieces, where)
        self._size += entry.size
        if entry.segments is not None:
            self._holes += entry.size - sum(count for _, count in entry.segments)
        if self._size > limits.UNPACKED or self._holes > limits.HOLES:
            raise too_much(f"with {shown(entry.name)} its files come to too many bytes", where)


class Tree:
    """The entries of one layer, added one by one."""

    def __init__(self, index: int, budget: Budget, where: str) -> None:
        self.root = Folder()
        self.below: dict[Node, list[bytes]] = {}  # hard links to files that this layer lacks
        self.where = where
        self._index = index
        self._budget = budget

    def top_names(self) -> frozenset[bytes]:
        """The names in the root that it adds or hides; b"" if it hides everything below."""
        names = {*self.root.children, *(self.root.hidden or ())}
        return frozenset(names | {b""} if self.root.is_opaque else names)

    def add(self, entry: Entry) -> None:
        parts = split(entry.name, self.where)
        if not parts:
            return  # the root itself: engines leave it unchanged
        self._budget.add(entry, self.where)
        if WHITEOUT in entry.name and self._hide(entry, parts):
            return
        kind = entry.kind
        node: Node | Folder
        if kind == LINK:
            node = self._linked(entry)
        elif kind == FOLDER:
            node = Folder(entry)
        else:
            if kind == SYMLINK and not 0 < len(entry.target) < limits.PATH:
                raise broken(f"the link {shown(entry.name)} has an invalid target", self.where)
            node = Node(entry, self._index)
        parent = self._parent(parts, entry)
        name = parts[-1]
        if kind == FOLDER and isinstance(there := parent.children.get(name), Folder):
            there.entry = entry
        elif kind == CHAR and entry.device == (0, 0):  # a whiteout in the form of overlayfs
            parent.children.pop(name, None)
            _hide(parent, name)
        else:
            parent.children[name] = node

    def _hide(self, entry: Entry, parts: list[bytes]) -> bool:
        """Apply a whiteout; return False if the entry is not one. Its kind does not matter."""
        *before, name = parts
        if any(part.startswith(RESERVED) for part in before):
            return True  # AUFS's own metadata
        if any(part.startswith(WHITEOUT) for part in before):
            raise broken(f"{shown(entry.name)} is inside a whiteout", self.where)
        if not name.startswith(WHITEOUT):
            return False
        if name == OPAQUE:
            self._parent(parts, entry).is_opaque = True
        elif not name.startswith(RESERVED):
            hidden = name[len(WHITEOUT) :]
            if hidden in (b"", b".", b".."):
                raise broken(f"{shown(entry.name)} is a whiteout without a name", self.where)
            _hide(self._parent(parts, entry), hidden)
        return True

    def _linked(self, entry: Entry) -> Node:
        target = split(entry.target, self.where)
        node = find(self.root, target, self.count)
        if node is None:
            node = Node(entry, self._index)
            self.below[node] = target
        elif isinstance(node, Folder):
            raise broken(
                f"the hard link {shown(entry.name)} leads to a folder ({shown(entry.target)})",
                self.where,
            )
        node.is_linked = True
        return node

    def count(self, steps: int) -> None:
        self._budget.walk(steps, self.where)

    def _parent(self, parts: list[bytes], entry: Entry) -> Folder:
        """The folder that an entry is in; made if it is missing."""
        self.count(len(parts))
        path = [self.root]
        todo = parts[-2::-1]
        followed = 0
        while todo:
            part = todo.pop()
            if part == b"..":  # from a link
                del path[1 if len(path) == 1 else -1 :]
                continue
            here = path[-1]
            child = here.children.get(part)
            if child is None:
                self._budget.charge(limits.NODE + len(part), self.where)
                child = here.children[part] = Folder()
            if isinstance(child, Folder):
                path.append(child)
                continue
            followed += 1
            if child.entry.kind != SYMLINK or followed > limits.LINKS:
                raise broken(
                    f"{shown(entry.name)} is inside {shown(part)}, which is not a folder",
                    self.where,
                )
            if child.entry.target.startswith(b"/"):
                del path[1:]
            more = steps(child.entry.target)
            self.count(len(more))
            todo += reversed(more)
            if any(len(step) > limits.NAME for step in more):
                raise refused(
                    f"{shown(entry.name)} lies behind a link to a name that is too long",
                    self.where,
                    "leave that file out of the image",
                )
        return path[-1]


def find(
    root: Folder, parts: Sequence[bytes], count: Callable[[int], None]
) -> Node | Folder | None:
    """The node at a path, or None; symbolic links on the way are followed within the tree.

    `count` is called with the numbers of steps that this takes.
    """
    count(len(parts))
    path = [root]
    todo = list(reversed(parts))
    followed = 0
    while todo:
        part = todo.pop()
        if part == b"..":
            del path[1 if len(path) == 1 else -1 :]
            continue
        child = path[-1].children.get(part)
        if isinstance(child, Folder):
            path.append(child)
        elif not todo or child is None:
            return child
        else:
            followed += 1
            if child.entry.kind != SYMLINK or followed > limits.LINKS:
                return None
            if child.entry.target.startswith(b"/"):
                del path[1:]
            more = steps(child.entry.target)
            count(len(more))
            todo += reversed(more)
    return path[-1]


def steps(target: bytes) -> list[bytes]:
    """The names in a link's target."""
    return [part for part in target.split(b"/") if part not in (b"", b".")]


def split(name: bytes, where: str) -> list[bytes]:
    """The parts of a name below the root, as engines read it; empty for the root itself.

    Raises `WorkError` for a name that leads out of the image or is too long.
    """
    parts = name.split(b"/")
    if b"" in parts or b"." in parts or b".." in parts:
        plain: list[bytes] = []
        for part in parts:
            if part == b"..":
                if not plain and not name.startswith(b"/"):
                    raise broken(f"{shown(name)} leads out of the image", where)
                del plain[-1:]
            elif part not in (b"", b"."):
                plain.append(part)
        parts = plain
    if len(name) >= limits.PATH or (parts and max(map(len, parts)) > limits.NAME):
        raise refused(
            f"the name {shown(name)} is longer than Linux can hold",
            where,
            "leave that file out of the image",
        )
    return parts


def _hide(folder: Folder, name: bytes) -> None:
    if folder.hidden is None:
        folder.hidden = set()
    folder.hidden.add(name)


def is_data(node: Node | Folder | None) -> TypeGuard[Node]:
    """Whether a node has content in a layer."""
    return isinstance(node, Node) and node.entry.kind == FILE and node.entry.size > 0


def merged(trees: Iterable[Tree]) -> Folder:
    """The tree that a container of these layers would see; the layers' own trees do not change.

    A whiteout hides entries of the layers below only, wherever it is in its layer's tar.
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
            "which is not a file",
            tree.where,
        )
    node.is_linked = True
    return node


def named(root: Folder, keep: Callable[[bytes], bool], where: str) -> dict[bytes, Node | Folder]:
    """All entries by path; a folder that is not kept is left out with all its content."""
    found: dict[bytes, Node | Folder] = {}
    size = 0
    todo = [(b"", root)]
    while todo:
        prefix, folder = todo.pop()
        for name, child in folder.children.items():
            path = prefix + name
            size += len(path)
            if len(path) >= limits.PATH or size > limits.TREE:  # links can make paths ever deeper
                raise too_much(f"{shown(path)} and the other paths are too long", where)
            if keep(path):
                found[path] = child
                if isinstance(child, Folder):
                    todo.append((path + b"/", child))
    return found
