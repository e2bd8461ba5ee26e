"""The bill of materials of an image, as SPDX 2.3 JSON, made inside the image while it is built.

    python3 sbom.py --meta /sqshforge/meta [--root /]

What the image holds is read from the image (`inventory.py`, which lies beside this file). What
that was made from is read from META/lock.json: base and compiler images, git sources, archives,
sdists, patches. The result is META/sbom.spdx.json: there whole or not at all, and the same bytes
for the same input where SOURCE_DATE_EPOCH gives the time.

Nothing is guessed. A license is declared where metadata gives an SPDX expression or a name that
means one license only, and a checksum stands where one file only can have been installed.

Standard library only: the Python that runs this has nothing else yet. Exit codes: 0 written,
1 the lock or the root cannot be read or the result not be written, 2 the request was wrong; one
line tells what is wrong.
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
LICENSES = "usr/share/doc"  # a folder for each source, as for each package of Debian's
NO_DIGEST = "no digest is known: what the tag named then, or a system made from packages instead"
IMAGE = re.compile(r"(?:([^/]*[.:][^/]*|localhost)/)?([^:@]+)(?::([^@]*))?(?:@.*)?")
# An address such as http://127.0.0.1/ is none for the readers of the document.
URL = re.compile(r"(?i)(https?|ftp|git|ssh)://([\w.~-]+@)?([a-z0-9-]+\.)+[a-z]{2,}(:\d+)?(/\S*)?")

Node = Mapping[str, Any]
Link = tuple[str, str, str]  # an element, its relationship to another, and that one


class LockError(Exception):
    """What is wrong with the lock."""


class Arguments(argparse.ArgumentParser):
    """Tells a wrong request in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {clean(message)}\n")


def members(node: Node, key: str) -> list[Node]:
    """The objects in a list of the lock; a list that is absent or null is empty."""
    found = node.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise LockError(f"{key} is not a list of objects")
    return found


def member(node: Node, key: str) -> Node:
    """An object of the lock; one that is absent or null is empty."""
    found = node.get(key) or {}
    if not isinstance(found, dict):
        raise LockError(f"{key} is not an object")
    return found


def string(node: Node, key: str) -> str:
    """A string of the lock; one that is absent or null is empty."""
    found = node.get(key) or ""
    if not isinstance(found, str):
        raise LockError(f"{key} is not a string")
    return clean(found)


def strings(node: Node, key: str) -> list[str]:
    """The strings in a list of the lock; a list that is absent or null is empty."""
    found = node.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise LockError(f"{key} is not a list of strings")
    return [clean(one) for one in found]


def name_of(node: Node) -> str:
    """The name that a part of the lock cannot be without."""
    if not (name := string(node, "name")):
        raise LockError(f"a part has no name: {clean(json.dumps(node))[:80]}")
    return name


def load(path: Path) -> Node:
    """The lock; `LockError` where it is not one, `OSError` where it cannot be read."""
    try:
        lock = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LockError(f"not valid JSON: {error}") from None
    if not isinstance(lock, dict) or not string(lock, "target"):
        raise LockError("not an object with a target")
    return lock


def only(sums: Iterable[str]) -> str:
    """The SHA-256 of a file, where one is known and no other is possible; else empty."""
    found = {one.lower().removeprefix("sha256:") for one in sums}
    one = found.pop() if len(found) == 1 else ""
    return one if re.fullmatch("[0-9a-f]{64}", one) else ""


def container(kind: str, node: Node) -> Iterator[Item]:
    """An image of a registry, by its name and, where the lock has it, its digest."""
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
    """A Python package of the lock as a file of an index, which need not be in the image."""
    name, version = name_of(node), string(node, "version")
    locator = purl("pypi", normalize(name), version)
    return Item(kind, name, version, purpose, sha256=only(strings(node, "hashes")), purl=locator)


def git_source(node: Node, root: Path) -> Item:
    """A git repository at its commit; without one it has no download location."""
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
    """A package, not an SPDX file: that would need a SHA-1, which the lock does not have."""
    if not (file := string(node, "file")):
        raise LockError("a patch has no file")
    return Item("patch", file, purpose="FILE", sha256=only([string(node, "sha256")]))


def contents(lock: Node, root: Path) -> set[Item]:
    """What the image holds: its system and the packages of dpkg and Python."""
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
    """What the lock says that parts of the image were built from."""
    return {
        *(distribution("sdist", one, "SOURCE") for one in members(member(lock, "python"), "built")),
        *(git_source(one, root) for one in members(lock, "sources")),
        *(archive(one) for one in members(lock, "archives")),
    }


def helpers(lock: Node) -> dict[Item, str]:
    """What was used while building and is not in the image, and how."""
    python = member(lock, "python")
    pip = member(python, "installer")
    programs = [*container("compiler", member(lock, "compiler"))]
    programs += [distribution("installer", pip, "APPLICATION")] if pip else []
    builders = (distribution("builder", one, "LIBRARY") for one in members(python, "builders"))
    return dict.fromkeys(programs, "BUILD_TOOL_OF") | dict.fromkeys(builders, "BUILD_DEPENDENCY_OF")


def named(name: str, items: Iterable[Item], *kinds: str) -> list[Item]:
    """The items of some kinds that have a name, in any spelling of it."""
    return [
        item for item in items if item.kind in kinds and normalize(item.name) == normalize(name)
    ]


def made_of(origin: Item, inside: Iterable[Item]) -> list[Item]:
    """The Python distributions in the image that a source of the lock was built into."""
    found = named(origin.name, inside, "python")
    return [one for one in found if origin.kind != "sdist" or one.version == origin.version]


def patched(node: Node, inside: set[Item], origins: set[Item], image: Item) -> set[Link]:
    """What a patch was for, and what holds it now: the image where nothing has its name."""
    one, subject = patch(node).id, string(node, "of")
    products = named(subject, inside, "python", "deb") or [image]
    originals = named(subject, origins, "source", "archive", "sdist") or products
    links = {(one, "PATCH_FOR", original.id) for original in originals}
    return links | {(one, "PATCH_APPLIED", product.id) for product in products}


def describe(lock: Node, root: Path) -> tuple[set[Item], set[Link]]:
    """All elements of the document and how they are related."""
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
    """The whole document; its namespace tells documents of different content apart."""
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
    """SOURCE_DATE_EPOCH, or now, as SPDX writes it; `ValueError` for what is no moment."""
    if not epoch:
        time = datetime.now(timezone.utc)
    elif not epoch.isdecimal():
        raise ValueError(epoch)
    else:
        time = datetime.fromtimestamp(int(epoch), timezone.utc)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def write(path: Path, content: dict[str, object]) -> None:
    """Put the document in place in one step; nothing is left of one that cannot be written."""
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
    except (ValueError, OverflowError, OSError):  # no number, or no year has so many seconds
        parser.error("SOURCE_DATE_EPOCH is not a number of seconds since 1970")
    try:
        next(options.root.iterdir(), None)  # a root that is not there is no empty image
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
