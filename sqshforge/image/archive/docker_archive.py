"""Archives of `docker save`: a manifest.json names a config and layers by their paths."""

from __future__ import annotations

from sqshforge.errors import RequestError
from sqshforge.image.archive.blobs import Store
from sqshforge.image.archive.layer import Layer, Region
from sqshforge.image.archive.layer_tree import split
from sqshforge.image.archive.oci_layout import Document, Image, check_count, diff_ids, load_document
from sqshforge.tar import limits
from sqshforge.tar.faults import broken, shown

HOME = "docker.io/library/"  # the prefix that docker leaves out of names


def find(store: Store, name: str, address: str) -> Image:
    """The image of a name; without a name, the only image."""
    listed = store.region("manifest.json")
    if listed is None:
        raise RequestError(
            f"{address} is not an archive of `docker save`: it has no manifest.json",
            fix="an OCI archive is oci-archive:FILE",
        )
    value = load_document(listed.whole(limits.JSON, "manifest.json"), "manifest.json", address)
    if not isinstance(value, list) or not value:
        raise broken("manifest.json is not a list of images", address)
    manifest = _chosen(
        [Document(one, "an image of manifest.json", address) for one in value], name, address
    )
    paths = manifest.texts("Layers")
    data = _member(store, manifest.text("Config"), "the config", address).whole(
        limits.JSON, "the config"
    )
    config = Document(load_document(data, "the config", address), "the config", address)
    diffs = diff_ids(config)
    check_count(len(paths), len(diffs), address)
    layers = []
    for number, (path, diff_id) in enumerate(zip(paths, diffs, strict=True), 1):
        what = f"layer {number} of {len(paths)}"
        where = f"{address}, {what} ({diff_id[:19]})"
        layers.append(Layer(_member(store, path, what, address), diff_id, None, where))
    return Image(data, tuple(layers), diffs, config)


def _chosen(images: list[Document], name: str, address: str) -> Document:
    tags = sorted({tag for one in images for tag in one.texts("RepoTags")})
    if name:
        for one in images:
            if _full(name) in map(_full, one.texts("RepoTags")):
                return one
        raise RequestError(
            f"{address} has no image {name!r}",
            fix=f"its images are: {', '.join(tags)}" if tags else "leave the name out",
        )
    if len({one.text("Config") for one in images}) > 1:
        raise RequestError(
            f"{address} has {len(images)} images",
            fix=f"add one of: :{', :'.join(tags)}" if tags else "save one image alone",
        )
    return images[0]


def _full(name: str) -> str:
    name = name.removeprefix(HOME)
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _member(store: Store, path: str, what: str, address: str) -> Region:
    parts = split(path.encode(errors="surrogateescape"), address)
    region = store.region(b"/".join(parts).decode(errors="surrogateescape"))
    if region is None:
        raise broken(f"{what} ({shown(path)}) is missing", address)
    return region
