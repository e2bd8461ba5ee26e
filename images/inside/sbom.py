"""Write the bill of materials of an image, as SPDX 2.3 JSON, inside the image while it is built.

    python3 sbom.py --meta /sqshforge/meta [--root /]

The contents of the image are read from the image (`inventory.py`, beside this file). What they were
made from is read from META/lock.json: base and compiler images, git sources, archives, sdists,
patches. The result, META/sbom.spdx.json, is written whole or not at all, and has the same bytes for
the same input if SOURCE_DATE_EPOCH gives the time.

Nothing is guessed. A license is declared only if metadata gives an SPDX expression or a name that
means one license only, and a checksum is given only if no other file can have been installed.

Standard library only: the Python that runs this has nothing else yet. Exit codes: 0 written; 1 the
lock or the root cannot be read, or the result cannot be written; 2 the request was wrong. One line
says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from inventory import (
    UNKNOWN,
    Item,
    clean,
    debian_packages,
    expression,
    normalize,
    purl,
    python_packages,
    read_system,
)

DOCUMENT = "SPDXRef-DOCUMENT"
NAMESPACE = "https://sqshforge.io/spdx"
LICENSES = "usr/share/doc"  # with a folder for each source, as for each Debian package
NO_DIGEST = "no digest is known: what the tag named then, or a system made from packages instead"
IMAGE = re.compile(r"(?:([^/]*[.:][^/]*|localhost)/)?([^:@]+)(?::([^@]*))?(?:@.*)?")
# Addresses such as http://127.0.0.1/ are of no use to readers of the document.
URL = re.compile(r"(?i)(https?|ftp|git|ssh)://([\w.~-]+@)?([a-z0-9-]+\.)+[a-z]{2,}(:\d+)?(/\S*)?")

Node = Mapping[str, Any]
Link = tuple[str, str, str]  # an element, its relationship to another, and the other


class LockError(Exception):
    """The lock cannot be used; the message says why."""


class Arguments(argparse.ArgumentParser):
    """A parser that reports a wrong request in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {clean(message)}\n")


def members(node: Node, key: str) -> list[Node]:
    """Return a list of objects of the lock; empty if it is absent or null."""
    found = node.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise LockError(f"{key} is not a list of objects")
    return found


def member(node: Node, key: str) -> Node:
    """Return an object of the lock; empty if it is absent or null."""
    found = node.get(key) or {}
    if not isinstance(found, dict):
        raise LockError(f"{key} is not an object")
    return found


def string(node: Node, key: str) -> str:
    """Return a string of the lock; empty if it is absent or null."""
    found = node.get(key) or ""
    if not isinstance(found, str):
        raise LockError(f"{key} is not a string")
    return clean(found)


def strings(node: Node, key: str) -> list[str]:
    """Return a list of strings of the lock; empty if it is absent or null."""
    found = node.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise LockError(f"{key} is not a list of strings")
    return [clean(one) for one in found]


def name_of(node: Node) -> str:
    """Return the name of a part of the lock; raise `LockError` if it has none."""
    if not (name := string(node, "name")):
        raise LockError(f"a part has no name: {clean(json.dumps(node))[:80]}")
    return name


def load(path: Path) -> Node:
    """Read a lock. Raises `LockError` if it is not one, `OSError` if it cannot be read."""
    try:
        lock = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LockError(f"not valid JSON: {error}") from None
    if not isinstance(lock, dict) or not string(lock, "target"):
        raise LockError("not an object with a target")
    return lock


def only(sums: Iterable[str]) -> str:
    """Return a file's SHA-256 if it is the only possible one; else an empty string."""
    found = {one.lower().removeprefix("sha256:") for one in sums}
    one = found.pop() if len(found) == 1 else ""
    return one if re.fullmatch("[0-9a-f]{64}", one) else ""


def container(kind: str, node: Node) -> Iterator[Item]:
    """Yield an image of a registry, by its name and, if the lock has it, its digest."""
    image, digest = string(node, "image"), string(node, "digest")
    if image:
        parts = IMAGE.fullmatch(image)
        if parts is None:
            raise LockError(f"not the name of an image: {image}")
        host, path, tag = (part or "" for part in parts.groups())
        yield Item(
            kind,
            image,
            tag or digest,
            "CONTAINER",
            sha256=only([digest]),
            purl=purl("docker", path, digest or tag, repository_url=host),
            source="" if digest else NO_DIGEST,
        )


def distribution(kind: str, node: Node, purpose: str) -> Item:
    """Return a Python package of the lock as a file of an index; it need not be in the image."""
    name, version = name_of(node), string(node, "version")
    locator = purl("pypi", normalize(name), version)
    return Item(kind, name, version, purpose, sha256=only(strings(node, "hashes")), purl=locator)


def git_source(node: Node, root: Path) -> Item:
    """Return a git repository at its commit; without a commit it has no download location."""
    url, ref, commit = (string(node, key) for key in ("git", "ref", "commit"))
    name, words = name_of(node), string(node, "license")
    declared = expression(words)
    summary = f"git {url}, {ref or 'no ref'}" + ("" if commit else ": no commit is known")
    place = root / LICENSES / name
    files = sorted(one.name for one in place.iterdir()) if place.is_dir() else ()
    if files:
        summary += f"; its license files: {', '.join(f'/{LICENSES}/{name}/{one}' for one in files)}"
    return Item(
        "source",
        name,
        commit or ref,
        "SOURCE",
        location=f"git+{url}@{commit}" if commit and URL.fullmatch(url) else UNKNOWN,
        license=declared or UNKNOWN,
        license_words="" if declared else words,
        source=clean(summary),
    )


def archive(node: Node) -> Item:
    url = string(node, "url")
    return Item(
        "archive",
        name_of(node),
        purpose="ARCHIVE",
        location=url if URL.fullmatch(url) else UNKNOWN,
        sha256=only([string(node, "sha256")]),
        source=url,
    )


def patch(node: Node) -> Item:
    """Return a package, not an SPDX file, which would need a SHA-1 that the lock does not have."""
    if not (file := string(node, "file")):
        raise LockError("a patch has no file")
    return Item("patch", file, purpose="FILE", sha256=only([string(node, "sha256")]))


def contents(lock: Node, root: Path) -> set[Item]:
    """Return what the image contains: its system and the packages of dpkg and Python."""
    system = read_system(root)
    vendor, version = system.get("ID", ""), system.get("VERSION_ID", "")
    title = system.get("PRETTY_NAME", "")
    found = {Item("system", vendor, version, "OPERATING_SYSTEM", source=title)} if vendor else set()
    python = member(lock, "python")
    packages = [*members(python, "packages")]
    packages += (one for index in members(python, "bound") for one in members(index, "packages"))
    sums = {
        (normalize(name_of(node)), string(node, "version")): only(strings(node, "hashes"))
        for node in packages
    }
    return found | {*debian_packages(root, system), *python_packages(root, sums)}


def sources(lock: Node, root: Path) -> set[Item]:
    """Return what parts of the image were built from, according to the lock."""
    return {
        *(distribution("sdist", one, "SOURCE") for one in members(member(lock, "python"), "built")),
        *(git_source(one, root) for one in members(lock, "sources")),
        *(archive(one) for one in members(lock, "archives")),
    }


def helpers(lock: Node) -> dict[Item, str]:
    """Return what was used to build the image but is not in it, each with its relationship."""
    python = member(lock, "python")
    pip = member(python, "installer")
    programs = [*container("compiler", member(lock, "compiler"))]
    programs += [distribution("installer", pip, "APPLICATION")] if pip else []
    builders = (distribution("builder", one, "LIBRARY") for one in members(python, "builders"))
    return dict.fromkeys(programs, "BUILD_TOOL_OF") | dict.fromkeys(builders, "BUILD_DEPENDENCY_OF")


def named(name: str, items: Iterable[Item], *kinds: str) -> list[Item]:
    """Return the items of some kinds that have this name, in any spelling."""
    return [
        item for item in items if item.kind in kinds and normalize(item.name) == normalize(name)
    ]


def made_of(origin: Item, inside: Iterable[Item]) -> list[Item]:
    """Return the Python distributions in the image that were built from a source of the lock."""
    found = named(origin.name, inside, "python")
    return [one for one in found if origin.kind != "sdist" or one.version == origin.version]


def patched(node: Node, inside: set[Item], origins: set[Item], image: Item) -> set[Link]:
    """Link a patch to what it was for and to what contains it now: by default the image."""
    one, subject = patch(node).id, string(node, "of")
    products = named(subject, inside, "python", "deb") or [image]
    originals = named(subject, origins, "source", "archive", "sdist") or products
    links = {(one, "PATCH_FOR", original.id) for original in originals}
    return links | {(one, "PATCH_APPLIED", product.id) for product in products}


def describe(lock: Node, root: Path) -> tuple[set[Item], set[Link]]:
    """Return all elements of the document and their relationships."""
    target, inputs = string(lock, "target"), string(lock, "inputs")
    image = Item("image", target, purpose="CONTAINER", source=inputs and f"lock of {inputs}")
    inside, origins = contents(lock, root), sources(lock, root)
    bases, used = set(container("base", member(lock, "base"))), helpers(lock)
    patches = members(lock, "patches")
    links = {
        (DOCUMENT, "DESCRIBES", image.id),
        *((image.id, "CONTAINS", one.id) for one in inside),
        *((image.id, "DESCENDANT_OF", one.id) for one in bases),
        *((one.id, how, image.id) for one, how in used.items()),
        *(
            (product.id, "GENERATED_FROM", origin.id)
            for origin in origins
            for product in made_of(origin, inside) or [image]
        ),
        *(link for node in patches for link in patched(node, inside, origins, image)),
    }
    return {image, *inside, *origins, *bases, *used, *map(patch, patches)}, links


def document(lock: Node, root: Path, created: str) -> dict[str, object]:
    """Return the whole document; documents with different content have different namespaces."""
    items, links = describe(lock, root)
    packages = [item.spdx() for item in sorted(items, key=lambda item: item.id)]
    relationships = [
        {"spdxElementId": one, "relationshipType": how, "relatedSpdxElement": other}
        for one, how, other in sorted(links)
    ]
    content = json.dumps([lock, packages, relationships], sort_keys=True)
    name, identity = string(lock, "target"), uuid.uuid5(uuid.NAMESPACE_URL, content)
    unlocked = strings(lock, "unlocked")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": name,
        "documentNamespace": f"{NAMESPACE}/{quote(name, '')}-{identity}",
        "creationInfo": {"created": created, "creators": ["Tool: sqshforge"]},
        **({"comment": f"Not locked: {'; '.join(unlocked)}"} if unlocked else {}),
        "packages": packages,
        "relationships": relationships,
    }


def moment(epoch: str | None) -> str:
    """Return SOURCE_DATE_EPOCH, or now, as SPDX writes it; raise `ValueError` if it is invalid."""
    if not epoch:
        time = datetime.now(timezone.utc)
    elif not epoch.isdecimal():
        raise ValueError(epoch)
    else:
        time = datetime.fromtimestamp(int(epoch), timezone.utc)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def write(path: Path, content: dict[str, object]) -> None:
    """Write the document atomically; nothing is left of one that cannot be written."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.chmod(0o644)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def main(arguments: Sequence[str]) -> int:
    parser = Arguments(
        prog="sbom.py", description="Write META/sbom.spdx.json, from inside an image."
    )
    parser.add_argument("--meta", type=Path, required=True, help="the folder of lock.json")
    parser.add_argument("--root", type=Path, default=Path("/"), help="the image [default: /]")
    options = parser.parse_args(arguments)
    try:
        created = moment(os.environ.get("SOURCE_DATE_EPOCH"))
    except (ValueError, OverflowError, OSError):  # not a number, or beyond the last year
        parser.error("SOURCE_DATE_EPOCH is not a number of seconds since 1970")
    try:
        next(options.root.iterdir(), None)  # a missing root is an error, not an empty image
        lock = load(options.meta / "lock.json")
        write(options.meta / "sbom.spdx.json", document(lock, options.root.resolve(), created))
    except OSError as error:
        parser.exit(
            1, f"{parser.prog}: {clean(f'{error.filename or options.meta}: {error.strerror}')}\n"
        )
    except LockError as error:
        parser.exit(1, f"{parser.prog}: {clean(f'{options.meta}/lock.json: {error}')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
