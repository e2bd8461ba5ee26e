"""Images in archives, made byte by byte: layers, configs, and every kind of archive of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sqshforge.errors import RequestError, SqshforgeError, WorkError
from sqshforge.image.archive.image import open_image

TIME = 1_600_000_000  # of every entry that is given no other
EPOCH = 1_700_000_000
FILES = {"etc/environment": b"A=1\n", "etc/rc": b"#!/bin/sh\n"}
# What the packer adds if an image does not have it.
SUPPLIED = {
    **dict.fromkeys(("dev", "proc", "sys"), "folder"),
    **dict.fromkeys(("etc/hostname", "etc/hosts", "etc/resolv.conf"), ""),
    "etc/mtab": "-> /proc/mounts",
}

Member = tuple[tarfile.TarInfo, bytes]
Tree = dict[str, tuple[tarfile.TarInfo, bytes]]

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "tar": lambda data: data,
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zstd": lambda data: zstandard.compress(data, 1),
}
OCI = "application/vnd.oci.image."


def file(name: str, content: bytes = b"", **facts: Any) -> Member:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), TIME, 0o644
    for key, value in facts.items():
        setattr(member, key, value)
    return member, content


def folder(name: str, mode: int = 0o755, **facts: Any) -> Member:
    return file(name, type=tarfile.DIRTYPE, mode=mode, **facts)


def link(name: str, target: str) -> Member:
    return file(name, type=tarfile.LNKTYPE, linkname=target)


def symlink(name: str, target: str) -> Member:
    return file(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777)


def tar(members: Iterable[Member], form: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form, errors="surrogateescape") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def layer(*members: Member, form: int = tarfile.PAX_FORMAT) -> bytes:
    return tar(members, form)


# The kinds of archives, and two layers that suit any image.
KINDS = ("oci", "oci-archive", "docker-archive")
PLAIN = layer(folder("bin"), file("bin/sh", b"shell", mode=0o755), symlink("sh", "bin/sh"))
MORE = layer(file("bin/sh", b"other"), file(".wh.sh"), folder("sqshforge"), file("sqshforge/a"))


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def dumped(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


# What an image has as /etc, and the folder that the files then go to.
HOMES: dict[str, tuple[list[Member], str]] = {
    "nothing": ([file("a")], "etc"),
    "a folder": ([folder("etc", 0o711), file("etc/rc", b"own"), file("etc/x")], "etc"),
    "folders in their way": ([file("etc/rc/deep/er"), folder("etc/environment")], "etc"),
    "links in their way": (
        [symlink("etc/rc", "../x"), file("x"), link("etc/environment", "x")],
        "etc",
    ),
    "a relative link": ([symlink("etc", "usr/etc"), file("usr/etc/rc", b"own")], "usr/etc"),
    "an absolute link": ([symlink("etc", "/usr/./etc/"), folder("usr/etc")], "usr/etc"),
    "a link to a link": ([symlink("etc", "a"), symlink("a", "../b"), folder("b")], "b"),
    "a link through a link": ([symlink("etc", "a/c"), symlink("a", "b"), folder("b/c")], "b/c"),
    "a link to the root": ([symlink("etc", "/"), file("rc", b"own")], "etc"),
    "a link to nowhere": ([symlink("etc", "usr/etc"), folder("usr")], "etc"),
    "a link in a circle": ([symlink("etc", "a"), symlink("a", "etc")], "etc"),
    "a link to itself": ([symlink("etc", "etc")], "etc"),
    "a link to a file": ([symlink("etc", "a"), file("a")], "etc"),
    "a link into a file": ([symlink("etc", "a/b"), file("a")], "etc"),
    "a link to what is left out": ([symlink("etc", "dev/etc"), folder("dev/etc")], "etc"),
    "a file": ([file("etc", b"no folder")], "etc"),
    "a FIFO": ([file("etc", type=tarfile.FIFOTYPE)], "etc"),
}


@dataclass(frozen=True)
class Image:
    """An image and how it is written; everything that is not given is valid."""

    layers: Sequence[bytes]
    packing: str = "tar"
    tag: str = "latest"
    blobs: Mapping[int, bytes] = field(default_factory=dict)  # of a layer, if not simply packed
    config: Any = None
    manifest: Any = None  # a function that returns a changed object
    index: Any = None

    def config_bytes(self) -> bytes:
        if self.config is not None and not callable(self.config):
            return dumped(self.config)
        value: dict[str, Any] = {
            "architecture": "amd64",
            "os": "linux",
            "created": "2024-02-29T12:00:00Z",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in self.layers]},
            "history": [{"created_by": f"step {n}"} for n in range(len(self.layers))],
        }
        return dumped(self.config(value) if callable(self.config) else value)

    def packed(self) -> list[bytes]:
        pack = PACKINGS[self.packing]
        return [self.blobs.get(n, b"") or pack(one) for n, one in enumerate(self.layers)]

    def oci_files(self) -> dict[str, bytes]:
        """Return the files of an OCI layout, by path."""
        config, found = self.config_bytes(), dict[str, bytes]()
        suffix = "" if self.packing == "tar" else f"+{self.packing}"

        def blob(data: bytes, media: str) -> dict[str, Any]:
            found[f"blobs/sha256/{sha256(data)[7:]}"] = data
            return {"mediaType": OCI + media, "digest": sha256(data), "size": len(data)}

        manifest: Any = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}manifest.v1+json",
            "config": blob(config, "config.v1+json"),
            "layers": [blob(one, f"layer.v1.tar{suffix}") for one in self.packed()],
        }
        manifest = self.manifest(manifest) if self.manifest else manifest
        described = blob(dumped(manifest), "manifest.v1+json")
        if self.tag:
            described["annotations"] = {"org.opencontainers.image.ref.name": self.tag}
        index: Any = {"schemaVersion": 2, "manifests": [described]}
        found["index.json"] = dumped(self.index(index) if self.index else index)
        found["oci-layout"] = dumped({"imageLayoutVersion": "1.0.0"})
        return found

    def docker_members(self) -> list[Member]:
        """Return what `docker save` writes before version 25."""
        config = self.config_bytes()
        members, layers = [], []
        for number, one in enumerate(self.packed()):
            name = f"{number:064x}/layer.tar"
            layers.append(name)
            members += [folder(f"{number:064x}/"), file(name, one)]
        manifest: Any = {
            "Config": f"{sha256(config)[7:]}.json",
            "RepoTags": [f"test:{self.tag}"] if self.tag else None,
            "Layers": layers,
        }
        listed = self.manifest([manifest]) if self.manifest else [manifest]
        return [
            *members,
            file(f"{sha256(config)[7:]}.json", config),
            file("manifest.json", dumped(listed)),
        ]


def write(image: Image, kind: str, place: Path) -> str:
    """Write an image as an archive of a kind; returns its address."""
    if kind == "docker-archive":
        place.write_bytes(tar(image.docker_members()))
    elif kind == "oci-archive":
        owner = {"uid": os.geteuid(), "gid": os.getegid()}  # so that skopeo can unpack it
        files = image.oci_files().items()
        place.write_bytes(tar(file(name, data, **owner) for name, data in files))
    else:
        put(image.oci_files(), place)
    return f"{kind}:{place}"


def put(files: Mapping[str, bytes], place: Path) -> None:
    """Write files below a folder."""
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def output(
    address: str,
    *,
    keep: Callable[[bytes], bool] = lambda name: True,
    layers: int | None = None,
    files: Mapping[str, bytes] = FILES,
    advance: Callable[[float], None] = lambda amount: None,
    xattrs: bool = False,
) -> bytes:
    """Return the tar made from an image."""
    out = io.BytesIO()
    with open_image(address) as image:
        image.write_tar(out, keep, layers, files, EPOCH, advance, xattrs=xattrs)
    return out.getvalue()


def parsed(data: bytes) -> Tree:
    """Return the entries of a tar, by name; fails if a name occurs twice."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        members = archive.getmembers()
        assert len({member.name for member in members}) == len(members)
        contents = {
            member.name: archive.extractfile(member) for member in members if member.isreg()
        }
        return {
            member.name: (member, content.read() if (content := contents.get(member.name)) else b"")
            for member in members
        }


def shape(tree: Tree) -> dict[str, str]:
    """Describe a tree in words: enough to compare it with the expected one at a glance."""
    return {name: _shape(*tree[name]) for name in sorted(tree)}


def _shape(member: tarfile.TarInfo, content: bytes) -> str:
    if member.isdir():
        return "folder"
    if member.issym() or member.islnk():
        return f"{'->' if member.issym() else '=>'} {member.linkname}"
    if member.isreg():
        return content.decode(errors="replace")
    return {tarfile.FIFOTYPE: "fifo", tarfile.CHRTYPE: "char", tarfile.BLKTYPE: "disk"}[member.type]


def merged(place: Path, *layers: bytes, **options: Any) -> dict[str, str]:
    """Return the shape of an image of these layers, without enroot's files."""
    address = write(Image(layers), "docker-archive", place / "image.tar")
    return shape(parsed(output(address, files={}, **options)))


def with_layer(image: Image, number: int, blob: bytes) -> Image:
    """Return the image with another blob for a layer, whose diff_id stays the same."""
    return replace(image, blobs={**image.blobs, number: blob})


# Tars that no library writes.

END = bytes(1024)


def header(name: bytes = b"a", kind: bytes = b"0", size: bytes = b"0", **fields: bytes) -> bytes:
    """Make a tar header of any content, with a valid checksum unless one is given."""
    raw = bytearray(512)
    places = {"mode": 100, "uid": 108, "mtime": 136, "target": 157, "magic": 257, "major": 329}
    raw[: len(name)] = name
    raw[124 : 124 + len(size)] = size
    raw[156:157] = kind
    for what, value in {"magic": b"ustar\x0000", "mode": b"644", **fields}.items():
        if what in places:
            raw[places[what] : places[what] + len(value)] = value
    raw[148:156] = fields.get("checksum", b"%06o\0 " % (sum(raw) + 8 * 32))
    return bytes(raw)


def extended(data: bytes, kind: bytes = b"x") -> bytes:
    """Make an extended header with these bytes, and the entry that it describes."""
    head = header(b"x", kind, b"%o" % len(data))
    return head + data + bytes(-len(data) % 512) + header(b"a", b"0")


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while length != len(line := b"%d %s=%s\n" % (length, key, value)):
        length = len(line)
    return line


def sparse(records: dict[bytes, bytes], stored: bytes = b"") -> bytes:
    """Make a sparse file with its map in an extended header, or at the start of the stored data."""
    data = b"".join(record(b"GNU.sparse." + key, value) for key, value in records.items())
    head = header(b"x", b"x", b"%o" % len(data))
    body = header(b"a", b"0", b"%o" % len(stored)) + stored + bytes(-len(stored) % 512)
    return head + data + bytes(-len(data) % 512) + body


def old_sparse(offset: bytes, count: bytes, real: bytes, more: int = 0, stored: int = 0) -> bytes:
    """Make a sparse file with its map in the header itself."""
    raw = bytearray(header(b"a", b"S", b"%o" % stored, magic=b"ustar  \0"))
    raw[386 : 386 + len(offset)] = offset
    raw[398 : 398 + len(count)] = count
    raw[482] = more
    raw[483 : 483 + len(real)] = real
    raw[148:156] = b"        "
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw) + bytes(stored + -stored % 512)


def binary(value: int) -> bytes:
    """Encode a number that octal digits cannot hold, as GNU tar does."""
    return (
        b"\x80" + value.to_bytes(11, "big")
        if value >= 0
        else value.to_bytes(12, "big", signed=True)
    )


def refused(address: str, match: str, kind: type[SqshforgeError] = WorkError) -> None:
    """Expect that an image is refused, with an error that says why."""
    with pytest.raises(kind, match=match) as caught:
        output(address)
    assert caught.value.where or isinstance(caught.value, RequestError)
    assert len(str(caught.value)) < 500
