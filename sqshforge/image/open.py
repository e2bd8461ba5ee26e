"""Images in archives: OCI layouts, OCI archives and what `docker save` writes.

They are read in place: no byte of an image touches the disk before the squash file has it. An
archive is taken for hostile: nothing in it names a place outside of it, `limits` bounds what it
can ask for, and every fault of it is a `WorkError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.image import docker_archive, oci_layout
from sqshforge.image.blobs import Directory, Tarred
from sqshforge.image.image import Archive

__all__ = ["Archive", "open_image"]

SCHEMES = ("oci", "oci-archive", "docker-archive")


@contextlib.contextmanager
def open_image(address: str) -> Iterator[Archive]:
    """The image at oci:DIR[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE[:NAME:TAG].

    `RequestError` where there is none.
    """
    scheme, _, rest = address.partition(":")
    if scheme not in SCHEMES or not rest or "\0" in rest:
        raise RequestError(
            f"{address!r} is no address of an image in an archive",
            mend="such are: oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME:TAG]",
        )
    path, name = _split(rest)
    with contextlib.ExitStack() as closing:
        if scheme == "docker-archive":
            image = docker_archive.find(Tarred(path, closing), name, address)
        elif scheme == "oci":
            image = oci_layout.find(Directory(path, closing), name, address)
        else:
            image = oci_layout.find(Tarred(path, closing), name, address)
        yield Archive(image, address)


def _split(text: str) -> tuple[Path, str]:
    """A path and what follows it: the path is the longest that there is, colons or not."""
    end = len(text)
    while end > 0:
        path = Path(text[:end])
        try:
            if path.exists():
                return path, text[end + 1 :]
        except OSError:  # a name that is too long
            pass
        end = text.rfind(":", 0, end)
    raise RequestError(
        f"{text.partition(':')[0]} does not exist", mend="see to the path's spelling"
    )
