"""OCI layouts: from an index to the manifest of one image, and from there to its layers."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import dataclass
from typing import Any

from sqshforge.errors import RequestError, WorkError
from sqshforge.image.archive.blobs import Store
from sqshforge.image.archive.layer import Layer, Region
from sqshforge.tar import limits
from sqshforge.tar.faults import AGAIN, broken, refused, shown, too_much

DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
CONFIGS = (
    "",
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
LAYERS = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar"
    r"|docker\.image\.rootfs\.(foreign\.)?diff\.tar)([.+](gzip|zstd))?"
)
NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
ATTESTATION = "vnd.docker.reference.type"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Document:
    """An object of a JSON file; its methods raise `WorkError` for values of the wrong type."""

    def __init__(self, value: Any, what: str, where: str) -> None:
        self._what = what
        self._where = where
        if not isinstance(value, dict):
            raise self.fault("is no object")
        self.value: dict[str, Any] = value

    def fault(self, why: str) -> Exception:
        return broken(f"{self._what} {why}", self._where)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fault(f"has no text as {key!r}")
        return value

    def number(self, key: str) -> int:
        value = self.value.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fault(f"has no size as {key!r}")
        return value

    def texts(self, key: str) -> list[str]:
        return [one for one in self._list(key) if self._is(isinstance(one, str), key)]

    def map(self, key: str) -> Document:
        return Document(self.value.get(key) or {}, f"{key!r} of {self._what}", self._where)

    def maps(self, key: str) -> list[Document]:
        what = f"one of {key!r} in {self._what}"
        return [Document(one, what, self._where) for one in self._list(key)]

    def _list(self, key: str) -> list[Any]:
        value = self.value.get(key)
        self._is(value is None or isinstance(value, list), key)
        return value or []

    def _is(self, is_right: bool, key: str) -> bool:
        if not is_right:
            raise self.fault(f"has a value of the wrong type for {key!r}")
        return True


def load_document(data: bytes, what: str, where: str) -> Any:
    """Parse JSON; raises `WorkError` if it is invalid or nested too deep."""
    try:
        value = json.loads(data.decode(), parse_int=_number)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise broken(f"{what} is nested too deep", where) from None
    except ValueError:  # invalid JSON, invalid UTF-8, or half of a surrogate pair
        raise broken(f"{what} is no JSON", where) from None


def read_json(region: Region, what: str, where: str) -> Document:
    return Document(load_document(region.whole(limits.JSON, what), what, where), what, where)


def _number(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError
    return int(digits)


@dataclass(frozen=True)
class Image:
    """The parts of an image whose layers are not read yet."""

    config: bytes
    layers: tuple[Layer, ...]
    diff_ids: tuple[str, ...]
    document: Document


def find(store: Store, tag: str, address: str) -> Image:
    """The image of a tag; without a tag, the only image, or the only one for this machine."""
    index = store.region("index.json")
    if index is None:
        raise RequestError(
            f"{address} is not an OCI image: it has no index.json",
            fix="an archive of `docker save` is docker-archive:FILE",
        )
    document = Document(
        load_document(index.whole(limits.JSON, "index.json"), "index.json", address),
        "index.json",
        address,
    )
    described = chosen(document, tag, address)
    for _ in range(limits.NESTING):
        document = _document(store, described, "a manifest", address)
        if _kind(described, document) in MANIFESTS:
            return _image(store, document, address)
        described = chosen(document, "", address)
    raise too_much(f"more than {limits.NESTING} indexes within each other", address)


def diff_ids(config: Document) -> tuple[str, ...]:
    """The digests of the layers in a config; also checks the types of the config's other parts."""
    found = tuple(config.map("rootfs").texts("diff_ids"))
    for one in found:
        if not DIGEST.fullmatch(one):
            raise config.fault(f"lists {shown(one)} as a layer, which is not a digest")
    for key in ("config", "Config"):
        config.map(key)
    config.text("created", "")
    config.maps("history")
    if "rootfs" not in config.value:
        raise config.fault("lists no layers: it is not a container image")
    return found


def check_count(layers: int, diffs: int, address: str) -> None:
    if layers > limits.LAYERS:
        raise too_much(f"an image of {layers} layers; {limits.LAYERS} are the most", address)
    if layers != diffs:
        raise broken(f"its manifest has {layers} layers, its config {diffs}", address)


def _image(store: Store, manifest: Document, address: str) -> Image:
    listed = manifest.maps("layers")
    described = manifest.map("config")
    if described.text("mediaType", "") not in CONFIGS:
        raise refused(
            f"it is {shown(described.text('mediaType'))}, not a container image",
            address,
            "give the address of a container image",
        )
    region = _blob(store, described, "the config", address)
    data = _read(region, described, "the config", address)
    config = Document(load_document(data, "the config", address), "the config", address)
    diffs = diff_ids(config)
    check_count(len(listed), len(diffs), address)
    layers = []
    for number, (one, diff_id) in enumerate(zip(listed, diffs, strict=True), 1):
        name = f"layer {number} of {len(diffs)}"
        media = one.text("mediaType")
        if not LAYERS.fullmatch(media):
            raise refused(
                f"{name} is {shown(media)}",
                address,
                "write the archive with layers that are tars, plain or with gzip or zstd",
            )
        region = _blob(store, one, name, address)
        where = f"{address}, {name} ({_digest(one)[:19]})"
        layers.append(Layer(region, diff_id, _digest(one), where))
    return Image(data, tuple(layers), diffs, config)


def chosen(index: Document, tag: str, address: str) -> Document:
    """The entry of an index for a tag and this machine; `RequestError` if none or several fit."""
    images = [one for one in index.maps("manifests") if not _is_attestation(one)]
    if tag:
        named = [one for one in images if tag in _names(one)]
        if not named:
            known = sorted({_names(one)[0] for one in images if _names(one)})
            raise RequestError(
                f"{address} has no image {tag!r}",
                fix=f"its images are: {', '.join(known)}" if known else "leave the name out",
            )
        images = named
    if not images:
        raise broken("an index lists no image", address)
    distinct = list({_digest(one): one for one in images}.values())
    if len(distinct) == 1:
        return distinct[0]
    here = MACHINES.get(platform.machine(), platform.machine())
    fitting = [one for one in distinct if _platform(one) == f"linux/{here}"]
    if len(fitting) == 1 or (fitting and not any(_names(one) for one in fitting)):
        return fitting[0]
    tags = sorted({_names(one)[0] for one in distinct if _names(one)})
    if tags and not tag:
        raise RequestError(
            f"{address} has {len(distinct)} images", fix=f"add one of: :{', :'.join(tags)}"
        )
    raise RequestError(
        f"{address} has no image for linux/{here}",
        fix=f"it has them for: {', '.join(sorted({_platform(one) for one in distinct}))}",
    )


def _names(described: Document) -> list[str]:
    """The names of an image: its short one, and the full one that docker adds."""
    notes = described.map("annotations")
    return [notes.text(key) for key in NAMES if notes.text(key, "")]


def _platform(described: Document) -> str:
    given = described.map("platform")
    return f"{given.text('os', 'unknown')}/{given.text('architecture', 'unknown')}"


def _is_attestation(described: Document) -> bool:
    if ATTESTATION in described.map("annotations").value:
        return True
    return "platform" in described.value and _platform(described) == "unknown/unknown"


def _kind(described: Document, document: Document) -> str:
    """The media type of a document, which is an index or a manifest."""
    given = described.text("mediaType", "") or document.text("mediaType", "")
    if not given:
        given = INDEXES[0] if "manifests" in document.value else MANIFESTS[0]
    if given not in (*INDEXES, *MANIFESTS):
        raise document.fault(f"is {shown(given)}, which is neither an image manifest nor an index")
    return given


def _digest(described: Document) -> str:
    digest = described.text("digest")
    if not DIGEST.fullmatch(digest):
        raise described.fault(f"has {shown(digest)} as its digest, which is not a valid digest")
    return digest


def _blob(store: Store, described: Document, what: str, address: str) -> Region:
    digest = _digest(described)
    region = store.region(f"blobs/{digest.replace(':', '/')}")
    size = described.number("size")
    if region is None and described.texts("urls"):
        raise refused(
            f"{what} is stored elsewhere: the archive has only its URL",
            address,
            "pull the image with its foreign layers, and save it again",
        )
    if region is None:
        raise broken(f"{what} ({digest[:19]}) is missing", address)
    if region.size != size:
        raise broken(f"{what} has {region.size} bytes; {size} were announced", address)
    return region


def _document(store: Store, described: Document, what: str, address: str) -> Document:
    region = _blob(store, described, what, address)
    return Document(
        load_document(_read(region, described, what, address), what, address), what, address
    )


def _read(region: Region, described: Document, what: str, address: str) -> bytes:
    """Read a blob's bytes and check them against its digest."""
    data = region.whole(limits.JSON, what)
    digest = _digest(described)
    algorithm = digest.partition(":")[0]
    if hashlib.new(algorithm, data).hexdigest() != digest.partition(":")[2]:
        raise mismatch(what, address)
    return data


def mismatch(what: str, where: str) -> WorkError:
    return WorkError(f"{what} does not match its digest: it was damaged", where=where, fix=AGAIN)
