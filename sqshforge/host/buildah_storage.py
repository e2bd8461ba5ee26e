"""How rootless buildah keeps layers: as overlays wherever that is possible, else as copies.

Left to itself, buildah 1.28 copies every layer whole (the driver vfs) although the kernel has let
ordinary users mount overlays since Linux 5.13: a build then takes many times as long, and the
size of the image for each of its layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from sqshforge.host.programs import Programs

CONFIGURED = ("STORAGE_DRIVER", "CONTAINERS_STORAGE_CONF")  # the user's own choice
FUSE = Path("/dev/fuse")
COPYING = (
    "warning: buildah can mount no overlays for this user, so it copies all layers whole: the "
    "build takes many times as long, and tens of GB. To mend it: Linux 5.13 or later and a local "
    "disk (not NFS) for ~/.local/share/containers, or fuse-overlayfs and, as root, "
    "modprobe fuse && chmod 0666 /dev/fuse"
)


def choose(buildah: Path, programs: Programs) -> None:
    """Set the variables by which buildah works with overlays, for this process and its children.

    Nothing is changed for root, nor where the user has configured a storage.
    """
    if os.geteuid() != 0 and not _is_configured(os.environ):
        for variables in _candidates(programs):
            if programs.attempt([buildah, "info"], env=variables).code == 0:
                os.environ.update(variables)
                return


def is_copying(info: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a storage, as `buildah info` describes it, copies layers whole."""
    return info["store"]["GraphDriverName"] == "vfs"


def _is_configured(environment: Mapping[str, str]) -> bool:
    above = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    file = Path(above) / "containers" / "storage.conf"
    return any(environment.get(name) for name in CONFIGURED) or file.exists()


def _candidates(programs: Programs) -> Iterator[dict[str, str]]:
    """The variables to try, the fastest first."""
    yield {"STORAGE_DRIVER": "overlay"}
    fuse = programs.which("fuse-overlayfs")
    if fuse is not None and os.access(FUSE, os.R_OK | os.W_OK):
        yield {"STORAGE_DRIVER": "overlay", "STORAGE_OPTS": f"overlay.mount_program={fuse}"}
